package nvml

import (
	"context"
	"errors"
)

var errSlow = errors.New("no answer yet")

// query is what a goroutine asks the driver. It may take longer than anybody waits.
type query[T any] struct {
	answers chan answer[T]
	away    bool
}

func newQuery[T any]() *query[T] { return &query[T]{answers: make(chan answer[T], 1)} }

// begin does nothing while the last one is still under way.
func (q *query[T]) begin(do func() (T, error)) {
	if q.away {
		return
	}
	q.away = true
	go func() {
		value, err := do()
		q.answers <- answer[T]{value, err}
	}()
}

// wait returns errSlow when patient ends before there is an answer, and when
// nothing is under way.
func (q *query[T]) wait(patient context.Context) (T, error) {
	var nothing T
	if !q.away {
		return nothing, errSlow
	}
	select {
	case a := <-q.answers:
		q.away = false
		return a.value, a.err
	case <-patient.Done():
	}
	select {
	case a := <-q.answers: // While others were waited for.
		q.away = false
		return a.value, a.err
	default:
		return nothing, errSlow
	}
}
