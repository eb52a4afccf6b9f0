package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/virgate/virgate/internal/simnode"
)

// changes measures from a cause outside the program to the moment in which the
// kubelet has the list that follows from it.
func changes(ctx context.Context, b bench) ([]figure, error) {
	var figures []figure
	for _, devices := range sizes {
		found, err := changesOf(ctx, b, devices)
		if err != nil {
			return nil, fmt.Errorf("changes of %d devices: %w", devices, err)
		}
		figures = append(figures, found...)
	}
	return figures, nil
}

func changesOf(ctx context.Context, b bench, devices int) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.share(devices); err != nil {
		return nil, err
	}
	p, err := s.run(ctx, s.configured()...)
	if err != nil {
		return nil, err
	}
	if err := s.shows(ctx, devices); err != nil {
		return nil, err
	}
	switched, err := s.switches(ctx, b.rounds(8), devices)
	if err != nil {
		return nil, err
	}
	last := devices + b.rounds(8)*boards
	failed, err := s.failures(ctx, last)
	if err != nil {
		return nil, err
	}
	kept, err := footprint(ctx, p)
	if err != nil {
		return nil, err
	}
	return prefixed(fmt.Sprintf("change/%d", devices), append([]figure{
		{"profile", milliseconds(switched.median()), "ms"},
		{"health", milliseconds(failed.median()), "ms"},
	}, kept...)), p.stop()
}

// settle is longer than the time in which lists go out as one.
const settle = 300 * time.Millisecond

func pause(ctx context.Context, length time.Duration) error {
	select {
	case <-time.After(length):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// switches are profiles that each have one replica more: a list that shrinks
// would wait for the quiet time.
func (s *stage) switches(ctx context.Context, times, devices int) (sample, error) {
	var took sample
	for range times {
		devices += boards
		if err := pause(ctx, settle); err != nil {
			return nil, err
		}
		if err := took.timed(func() error {
			if err := s.share(devices); err != nil {
				return err
			}
			return s.shows(ctx, devices)
		}); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// failures are boards that report a fatal error, one after the other.
func (s *stage) failures(ctx context.Context, devices int) (sample, error) {
	var took sample
	for gpu := range boards - 1 {
		if err := pause(ctx, settle); err != nil {
			return nil, err
		}
		if err := took.timed(func() error {
			if err := simnode.Command(ctx, s.path("control.sock"), "xid", map[string]string{"gpu": strconv.Itoa(gpu), "code": "79"}); err != nil {
				return err
			}
			return s.shows(ctx, devices-(gpu+1)*devices/boards)
		}); err != nil {
			return nil, err
		}
	}
	return took, nil
}
