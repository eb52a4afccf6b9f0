package trace

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// Options are a Recorder's settings.
type Options struct {
	// Plain leaves the UUIDs as they are; else they are masked.
	Plain bool
	// Limit is the size in bytes at which the trace ends; Limit when zero.
	Limit int
	// Failed is told, once and from any goroutine, why the trace ends before its
	// time: ErrFull, or what became of writing. Nil is told nothing.
	Failed func(error)
}

// ErrFull says that the trace has reached its limit.
var ErrFull = errors.New("the trace has reached its size limit and ends here")

// Record returns a library that answers as lib does and writes to w, call by
// call, what that was. Waits for events that only time out are left out: a node
// makes some a second. No call fails because nothing can be written any more.
//
// Its methods may be called from any goroutine, if lib's may.
func Record(lib nvml.Library, w io.Writer, options Options) nvml.Library {
	options.Limit = cmp.Or(options.Limit, Limit)
	r := &recorder{lib: lib, options: options, masker: newMasker(), to: w}
	r.write(header{Trace: version, Masked: !options.Plain})
	return r
}

// recorder is a library with a recorder. Its other methods are in
// recordercalls.go, recordermetering.go, recordermig.go and recordercutting.go.
type recorder struct {
	lib     nvml.Library
	options Options
	masker  masker

	mu      sync.Mutex
	to      io.Writer
	written int
	ended   bool
}

// note writes down a call with its answer, nil for one without.
func (r *recorder) note(call string, answer any, err error, arguments ...uint64) {
	l := line{Call: call, Arguments: arguments}
	switch {
	case err != nil:
		l.Error = failureOf(call, err)
	case answer != nil:
		l.Answer = r.encode(answer)
	}
	r.write(l)
}

// encode is the answer as JSON. All answers are numbers, texts and truth values,
// which cannot fail.
func (r *recorder) encode(answer any) json.RawMessage {
	text, _ := json.Marshal(answer)
	if !r.options.Plain {
		text = r.masker.mask(text)
	}
	return text
}

// failureOf keeps what a program can see of an error: the call and the code.
func failureOf(call string, err error) *failure {
	if failed, ok := errors.AsType[*nvml.Error](err); ok {
		return &failure{Call: failed.Call, Return: failed.Return}
	}
	return &failure{Call: call, Return: nvml.Unknown}
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

// EventSetWait is written down when it returns anything but Timeout.
func (r *recorder) EventSetWait(set nvml.EventSet, timeout time.Duration) (nvml.Event, error) {
	event, err := r.lib.EventSetWait(set, timeout)
	if !errors.Is(err, nvml.Timeout) {
		r.note(waitCall, event, err, uint64(set))
	}
	return event, err
}
