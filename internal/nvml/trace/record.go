package trace

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sync"

	"github.com/virgate/virgate/internal/nvml"
)

// Options are a recorder's settings.
type Options struct {
	// Plain leaves the UUIDs unchanged; otherwise they are masked.
	Plain bool
	// Limit is the size in bytes at which the trace ends; the constant Limit when zero.
	Limit int
	// Failed is called once, from any goroutine, with the reason why the trace ends early: ErrFull,
	// or a write error. It may be nil.
	Failed func(error)
}

// ErrFull means that the trace has reached its limit.
var ErrFull = errors.New("the trace has reached its size limit and ends here")

// Record returns a library that answers as lib does, and that writes each call with its answer to
// w. It leaves out waits for events that only time out, because a node makes several a second. No
// call fails because of an error of w.
//
// Its methods may be called from any goroutine if lib's may.
func Record(lib nvml.Library, w io.Writer, options Options) nvml.Library {
	options.Limit = cmp.Or(options.Limit, Limit)
	r := &recorder{options: options, to: w}
	r.write(header{Trace: version, Masked: !options.Plain})
	return nvml.Intercept(lib, r.call)
}

type recorder struct {
	options Options

	mu      sync.Mutex
	to      io.Writer
	written int
	ended   bool
}

// call makes the call and records it.
func (r *recorder) call(call nvml.Call, do func() (any, error)) (any, error) {
	answer, err := do()
	if call.Method == waitMethod && errors.Is(err, nvml.Timeout) {
		return answer, err
	}
	l := line{Call: call.Method, Arguments: numbers(call.Arguments)}
	switch {
	case err != nil:
		l.Error = &nvml.Error{Call: call.Method, Return: nvml.Unknown}
		if failed, ok := errors.AsType[*nvml.Error](err); ok {
			l.Error = failed
		}
	case call.Answer != nil:
		// Answers consist of numbers, texts and truth values, so this cannot fail.
		l.Answer, _ = json.Marshal(answer)
		if !r.options.Plain {
			l.Answer = mask(l.Answer)
		}
	}
	r.write(l)
	return answer, err
}

var uuid = regexp.MustCompile(`[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}`)

// mask replaces each UUID in the text by its hash. A GPU then has the same hash in all traces, but
// cannot be identified by it: a UUID is too long to guess. Nothing else in a trace identifies a
// GPU, because Library has no call for serial numbers.
func mask(text []byte) []byte {
	return uuid.ReplaceAllFunc(text, func(found []byte) []byte {
		sum := sha256.Sum256(append([]byte("virgate trace "), found...))
		return fmt.Appendf(nil, "%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
	})
}

func (r *recorder) write(value any) {
	text, err := json.Marshal(value)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	text = append(text, '\n')
	if err == nil && r.written+len(text) > r.options.Limit {
		err = ErrFull
	}
	if err == nil {
		r.written += len(text)
		_, err = r.to.Write(text)
	}
	if err != nil {
		r.ended = true
		if r.options.Failed != nil {
			r.options.Failed(fmt.Errorf("trace: %w", err))
		}
	}
}
