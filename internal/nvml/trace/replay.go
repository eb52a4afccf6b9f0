package trace

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// replay is a library that answers from a trace. Its other methods are in
// replaycalls.go, replaymetering.go, replaymig.go and replaycutting.go.
type replay struct {
	mu sync.Mutex
	// answers are what is left of the trace, by key.
	answers map[string][]line
	// opened is NVML's count of Init less Shutdown.
	opened int
}

func (r *replay) add(l line) {
	k := key(l.Call, l.Arguments)
	r.answers[k] = append(r.answers[k], l)
}

// next is the answer to a call, which is then used up unless it is the last.
func (r *replay) next(call string, arguments []uint64) (line, bool) {
	k := key(call, arguments)
	left := r.answers[k]
	if len(left) == 0 {
		return line{}, false
	}
	if len(left) > 1 {
		r.answers[k] = left[1:]
	}
	return left[0], true
}

// play answers a call.
func play[T any](r *replay, call string, arguments ...uint64) (T, error) {
	var value T
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.opened == 0 {
		return value, &nvml.Error{Call: call, Return: nvml.Uninitialized}
	}
	l, known := r.next(call, arguments)
	if !known {
		return value, &nvml.Error{Call: call, Return: nvml.NotSupported}
	}
	return decode[T](l)
}

// decode is the line's answer, which Parse has found to be a T.
func decode[T any](l line) (T, error) {
	var value T
	if l.Error != nil {
		return value, &nvml.Error{Call: l.Error.Call, Return: l.Error.Return}
	}
	if l.Answer == nil {
		return value, nil
	}
	if err := json.Unmarshal(l.Answer, &value); err != nil {
		return value, fmt.Errorf("trace: %s: %w", l.Call, err)
	}
	return value, nil
}

// Init opens the trace, which does not begin anew.
func (r *replay) Init() error { return r.open("Init", 1) }

// Shutdown takes back one Init.
func (r *replay) Shutdown() error { return r.open("Shutdown", -1) }

func (r *replay) open(call string, count int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.opened+count < 0 {
		return &nvml.Error{Call: call, Return: nvml.Uninitialized}
	}
	if l, known := r.next(call, nil); known {
		if _, err := decode[struct{}](l); err != nil {
			return err
		}
	}
	r.opened += count
	return nil
}

// EventSetWait never repeats an event.
func (r *replay) EventSetWait(set nvml.EventSet, timeout time.Duration) (nvml.Event, error) {
	if event, err, known := r.event(set); known {
		return event, err
	}
	<-time.After(timeout)
	return nvml.Event{}, &nvml.Error{Call: waitCall, Return: nvml.Timeout}
}

func (r *replay) event(set nvml.EventSet) (event nvml.Event, err error, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.opened == 0 {
		return event, &nvml.Error{Call: waitCall, Return: nvml.Uninitialized}, true
	}
	k := key(waitCall, []uint64{uint64(set)})
	left := r.answers[k]
	if len(left) == 0 {
		return event, nil, false
	}
	r.answers[k] = left[1:]
	event, err = decode[nvml.Event](left[0])
	return event, err, true
}
