package wake

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestSignal(t *testing.T) {
	s := NewSignal()
	s.Notify()
	s.Notify() // Does not wait.
	<-s
	select {
	case <-s:
		t.Error("two signals that were not received are not one")
	default:
	}
	Signal(nil).Notify()
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := context.WithDeadline(t.Context(), began.Add(time.Hour))
		defer cancel()
		for _, want := range []struct {
			slept bool
			at    time.Duration
		}{{true, 40 * time.Minute}, {false, time.Hour}, {false, time.Hour}} {
			slept := Sleep(ctx, 40*time.Minute)
			at := time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
			if slept != want.slept || at != want.at {
				t.Errorf("slept: %t, until %s; want %t, until %s", slept, at, want.slept, want.at)
			}
		}
	})
}

func TestBackoff(t *testing.T) {
	retry := Backoff(time.Second, 5*time.Second)
	for _, want := range []time.Duration{1, 2, 4, 5, 5} {
		if got := retry.Step(); got != want*time.Second {
			t.Errorf("pause %s, want %s", got, want*time.Second)
		}
	}
}
