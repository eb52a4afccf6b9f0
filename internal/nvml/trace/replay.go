package trace

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// Limit is the size, in bytes, at which Record stops and from which Parse rejects a trace. Reading
// a node with eight GPUs once takes about 50 kB.
const Limit = 64 << 20

// longestLine is the maximum length of a line, in bytes. The longest answer lists the processes of
// a GPU, at 40 bytes each.
const longestLine = 1 << 20

// waitMethod is the only method that does not repeat its last answer.
const waitMethod = "EventSetWait"

// Parse reads a trace and returns a library that answers from it. An error names the line. Blank
// lines are not allowed. A trace whose recorder was interrupted ends without a line feed, which is
// an error too.
//
// Repeated calls with the same arguments get the answers of the trace in order, and then the last
// answer again and again. A call that the trace does not have gets NotSupported, except for Init
// and Shutdown, which then succeed. EventSetWait returns each event or error of the trace once;
// after that it waits and times out.
//
// The library's methods may be called from any goroutine. Opening it again does not restart the
// trace.
func Parse(data []byte) (nvml.Library, error) {
	if len(data) > Limit {
		return nil, fmt.Errorf("trace: %d bytes, more than %d", len(data), Limit)
	}
	if len(data) > 0 && data[len(data)-1] != '\n' {
		return nil, fmt.Errorf("trace: line %d: cut off", bytes.Count(data, []byte("\n"))+1)
	}
	scanner := bufio.NewScanner(bytes.NewReader(data))
	scanner.Buffer(nil, longestLine)
	r := &replay{methods: methods(), lines: map[string][]line{}}
	number := 0
	for scanner.Scan() {
		number++
		read := r.read
		if number == 1 {
			read = readHeader
		}
		if err := read(scanner.Bytes()); err != nil {
			return nil, fmt.Errorf("trace: line %d: %w", number, err)
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("trace: line %d: %w", number+1, err)
	}
	if number == 0 {
		return nil, errors.New("trace: empty, not even a header")
	}
	return nvml.Intercept(nil, r.call), nil
}

func readHeader(text []byte) error {
	var h header
	if err := decodeStrictly(text, &h); err != nil {
		return fmt.Errorf("not the header of a trace: %w", err)
	}
	if h.Trace != version {
		return fmt.Errorf("version %d of the format, this program reads %d", h.Trace, version)
	}
	return nil
}

type replay struct {
	methods map[string]method

	mu sync.Mutex
	// lines holds the rest of the trace, by key.
	lines map[string][]line
	// opened counts as NVML does: calls of Init minus calls of Shutdown.
	opened int
}

func (r *replay) read(text []byte) error {
	var l line
	if err := decodeStrictly(text, &l); err != nil {
		return err
	}
	known, ok := r.methods[l.Call]
	if !ok {
		return fmt.Errorf("no call %q", l.Call)
	}
	if err := known.check(l); err != nil {
		return err
	}
	k := key(l.Call, l.Arguments)
	r.lines[k] = append(r.lines[k], l)
	return nil
}

// call is the library's Interceptor.
func (r *replay) call(call nvml.Call, _ func() (any, error)) (any, error) {
	answer, err, known := r.next(call)
	switch {
	case known && call.Method == "DeviceGetProcessUtilization" && err == nil:
		return since(answer.([]nvml.ProcessSample), call.Arguments[1].(uint64))
	case known:
		return answer, err
	case call.Method == waitMethod:
		<-time.After(call.Arguments[1].(time.Duration)) // Wait as long as the driver would.
		return nil, &nvml.Error{Call: call.Method, Return: nvml.Timeout}
	}
	return nil, &nvml.Error{Call: call.Method, Return: nvml.NotSupported}
}

// next returns the answer to a call and removes it, unless it is the last one; false if the trace
// has none.
func (r *replay) next(call nvml.Call) (answer any, err error, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.opened == 0 && call.Method != "Init" {
		return nil, &nvml.Error{Call: call.Method, Return: nvml.Uninitialized}, true
	}
	k := key(call.Method, numbers(call.Arguments))
	if left := r.lines[k]; len(left) > 0 {
		known = true
		answer, err = left[0].decode(call.Answer)
		if failed := left[0].Error; failed != nil {
			answer, err = nil, &nvml.Error{Call: failed.Call, Return: failed.Return}
		}
		if len(left) > 1 || call.Method == waitMethod {
			r.lines[k] = left[1:]
		}
	}
	if opens := map[string]int{"Init": 1, "Shutdown": -1}[call.Method]; opens != 0 && err == nil {
		r.opened += opens
		known = true
	}
	return answer, err, known
}

// since leaves out the samples that the caller has already seen, so that a repeated answer is not
// mistaken for new samples.
func since(samples []nvml.ProcessSample, lastSeen uint64) (any, error) {
	var later []nvml.ProcessSample
	for _, s := range samples {
		if s.Time > lastSeen {
			later = append(later, s)
		}
	}
	if len(later) == 0 {
		return nil, &nvml.Error{Call: "DeviceGetProcessUtilization", Return: nvml.NotFound}
	}
	return later, nil
}
