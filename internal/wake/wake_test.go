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
		if !Sleep(t.Context(), time.Minute) || time.Since(began) != time.Minute {
			t.Errorf("slept for %s", time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began = time.Now()
		if Sleep(ctx, time.Minute) || time.Since(began) != time.Second {
			t.Errorf("slept for %s with a context of 1 s", time.Since(began))
		}
	})
}
