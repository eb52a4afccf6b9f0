package daemon

import (
	"context"
	"fmt"
	"time"
)

const (
	// resetLimit limits a reset of a GPU, settingLimit the setting of a time slice, and
	// abandonGrace how long either may then take to end.
	resetLimit   = 5 * time.Minute
	settingLimit = 30 * time.Second
	abandonGrace = 300 * time.Millisecond
)

// abandonable calls a function that runs nvidia-smi. A process that waits in the kernel cannot be
// killed, so it is abandoned.
func abandonable(ctx context.Context, limit time.Duration, what string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- do(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(abandonGrace):
		return fmt.Errorf("abandoned %s, which does not end: %w", what, ctx.Err())
	}
}
