package daemon

import (
	"context"
	"fmt"
	"time"
)

const (
	// resetLimit is how long a reset of a GPU may take, settingLimit how long setting a time slice
	// may, and abandonGrace how long either may then take to end.
	resetLimit   = 5 * time.Minute
	settingLimit = 30 * time.Second
	abandonGrace = 300 * time.Millisecond
)

// abandonable calls what runs nvidia-smi. What waits in the kernel cannot be killed, and is
// abandoned.
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
