package daemon

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestResetThatDoesNotEnd checks that a reset that cannot be stopped is abandoned.
func TestResetThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]time.Duration{"the program ends": abandonGrace, "the time is over": resetLimit + abandonGrace} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				never := make(chan struct{})
				defer close(never)
				reset := func(context.Context) error {
					<-never
					return nil
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if want == abandonGrace {
					cancel()
				}
				began := time.Now()
				err := abandonable(ctx, resetLimit, "the reset", reset)
				took := time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
				if err == nil || !strings.Contains(err.Error(), "abandoned the reset") || took != want {
					t.Errorf("after %s: %v, want it after %s", took, err, want)
				}
			})
		})
	}
}
