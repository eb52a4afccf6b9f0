package await_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/test/await"
)

func TestCondition(t *testing.T) {
	for _, c := range []struct {
		name      string
		cancelled bool
		answer    func(calls int) error
		want      string        // part of the error
		took      time.Duration // at least
	}{
		{"holds at once", false, func(int) error { return nil }, "", 0},
		{"holds later", false, func(calls int) error {
			if calls < 15 {
				return errors.New("too few")
			}
			return nil
		}, "", 100 * time.Millisecond},
		{"never", false, func(int) error { return await.Never("pod %s is %s", "a", "Failed") }, "pod a is Failed", 0},
		{"hangs", false, func(int) error { return errors.New("too few") }, "too few", await.Patience},
		{"cancelled", true, func(int) error { return errors.New("too few") }, "cancelled: too few", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cancelled := make(chan struct{})
				if c.cancelled {
					close(cancelled)
				}
				calls, began := 0, time.Now()
				err := await.Condition(cancelled, func() error { calls++; return c.answer(calls) })
				if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
					t.Errorf("error %v, want %q", err, c.want)
				}
				took := time.Since(began)
				if took < c.took || took > c.took+time.Second {
					t.Errorf("it took %s, want %s", took, c.took)
				}
			})
		})
	}
}
