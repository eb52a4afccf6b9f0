package mps_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/test/await"
)

// stubborn is a Control whose daemon does not answer while deaf, and then does not end at the first try.
type stubborn struct {
	mps.Control
	deaf atomic.Bool
}

func (s *stubborn) Ask(ctx context.Context, env mps.Environment, command string) (string, error) {
	if s.deaf.Load() {
		return "", errors.New("no answer")
	}
	return s.Control.Ask(ctx, env, command)
}

func (s *stubborn) Clear(ctx context.Context, env mps.Environment) error {
	if s.deaf.CompareAndSwap(true, false) {
		return errors.New("process 7 does not end")
	}
	return s.Control.Clear(ctx, env)
}

// TestDaemonsCounted checks that a daemon that did not end at once and was started again counts once: after a
// replaced driver, the program ends when the last daemon does.
func TestDaemonsCounted(t *testing.T) {
	t.Parallel()
	control := &stubborn{Control: inProcess()}
	n := newNode(t, control)
	replaced, ended := make(chan struct{}), make(chan error, 1)
	failure := errors.New("another driver is mounted")
	n.options.DriverReplaced = func(ctx context.Context) error {
		select {
		case <-replaced:
			return failure
		case <-ctx.Done():
			return nil
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { ended <- mps.Run(ctx, n.options) }()
	await.Until(t, "the supervisor's socket", n.dial)
	n.connect()
	n.client.Want([]mps.Unit{unit(gpu)})
	n.await(gpu + " ready")
	control.deaf.Store(true)
	await.True(t, "not ended at once", func() bool { return !control.deaf.Load() })
	n.await(gpu + " ready")
	n.client.Want(nil)
	n.await()
	close(replaced)
	if err := <-ended; !errors.Is(err, failure) {
		t.Error(err)
	}
}
