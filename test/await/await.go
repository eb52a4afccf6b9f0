// Package await lets tests wait for conditions. Tests that cannot run in a synctest bubble (real
// processes, sockets, containers) use it, so that no test sleeps or depends on the clock. The
// linter forbids both everywhere else in tests.
package await

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// Patience ends a wait that hangs. It is far longer than anything takes on the slowest machine, so
// no test depends on a machine's speed.
const Patience = 5 * time.Minute

// The pause between two checks grows from the first to the last, because each check can be a request that
// slows down what it waits for.
const (
	firstPause = time.Millisecond
	lastPause  = 200 * time.Millisecond
)

// errNever marks a condition that can no longer come true.
var errNever = errors.New("this can no longer happen")

// Never returns an error for a condition that can no longer come true, for example that a pod runs
// which has Failed. With it Until fails at once.
func Never(format string, arguments ...any) error {
	return fmt.Errorf("%w: %w", errNever, fmt.Errorf(format, arguments...))
}

// Until waits until condition returns nil. It fails the test with the condition's last error after
// Patience, or at once if that error is from Never. Only the goroutine that runs the test may call
// it.
func Until(t testing.TB, what string, condition func() error) {
	t.Helper()
	if err := Condition(t.Context().Done(), condition); err != nil {
		t.Fatalf("wait for %s: %v", what, err)
	}
}

// True is Until for a condition that returns no error.
func True(t testing.TB, what string, condition func() bool) {
	t.Helper()
	Until(t, what, func() error {
		if condition() {
			return nil
		}
		return errNotYet
	})
}

var errNotYet = errors.New("not yet")

// Condition waits until condition returns nil. It returns the last error after Patience, when the
// error is from Never, or when cancelled is closed.
func Condition(cancelled <-chan struct{}, condition func() error) error {
	timeout := time.NewTimer(Patience)
	defer timeout.Stop()
	pause := time.NewTimer(firstPause)
	defer pause.Stop()
	for next := firstPause; ; next = min(next*3/2, lastPause) {
		err := condition()
		if err == nil || errors.Is(err, errNever) {
			return err
		}
		pause.Reset(next)
		select {
		case <-cancelled:
			return fmt.Errorf("cancelled: %w", err)
		case <-timeout.C:
			return fmt.Errorf("%s have passed: %w", Patience, err)
		case <-pause.C:
		}
	}
}
