package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
)

// replicas is how many devices a board has in a succession.
const replicas = 4

// succession measures how long the kubelet is without devices when one virgate
// takes over from another that stands by, as in a rollout: from the end of the
// first stream to the last resource's list.
func succession(ctx context.Context, b bench) ([]figure, error) {
	var figures []figure
	for _, resources := range []int{1, boards} {
		found, err := successionOf(ctx, b, resources)
		if err != nil {
			return nil, fmt.Errorf("succession with %d resources: %w", resources, err)
		}
		figures = append(figures, found...)
	}
	return figures, nil
}

func successionOf(ctx context.Context, b bench, resources int) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := os.WriteFile(s.path("profile.yaml"), named(resources), 0o600); err != nil {
		return nil, fmt.Errorf("write the profile: %w", err)
	}
	serving, err := s.alone(ctx)
	if err != nil {
		return nil, err
	}
	var without, ended sample
	for range b.rounds(20) {
		if err := s.await(ctx, func(k simkubelet.Snapshot) bool { return allocatable(k) == boards*replicas }); err != nil {
			return nil, err
		}
		next, err := s.alone(ctx)
		if err != nil {
			return nil, err
		}
		if err := next.standsBy(ctx); err != nil {
			return nil, err
		}
		stopped := make(chan error, 1)
		began := time.Now()
		go func() { stopped <- serving.stop() }()
		if err := s.await(ctx, func(k simkubelet.Snapshot) bool { return allocatable(k) < boards*replicas }); err != nil {
			return nil, err
		}
		lost := time.Now()
		if err := s.await(ctx, func(k simkubelet.Snapshot) bool { return allocatable(k) == boards*replicas }); err != nil {
			return nil, err
		}
		without = append(without, time.Since(lost))
		if err := <-stopped; err != nil {
			return nil, err
		}
		ended = append(ended, lost.Sub(began))
		serving = next
	}
	name := func(what string) string { return fmt.Sprintf("succession/%d/%s", resources, what) }
	return []figure{
		{name("until-lost"), milliseconds(ended.median()), "ms"},
		{name("without-least"), milliseconds(without.quantile(0)), "ms"},
		{name("without"), milliseconds(without.median()), "ms"},
		{name("without-most"), milliseconds(without.quantile(1)), "ms"},
	}, serving.stop()
}

// named offers all boards under one name, or each under its own.
func named(resources int) []byte {
	text := "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"
	if resources == 1 {
		return fmt.Appendf(nil, text+"    - {name: %s, replicas: %d}\n", resource, replicas)
	}
	var entries strings.Builder
	for i := range boards {
		fmt.Fprintf(&entries, "    - {name: %s, devices: [%d], replicas: %d, rename: nvidia.com/board-%d}\n", resource, i, replicas, i)
	}
	return []byte(text + entries.String())
}

func (s *stage) await(ctx context.Context, condition func(simkubelet.Snapshot) bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return s.kubelet.Await(ctx, condition)
}

// allocatable counts the healthy devices of all resources.
func allocatable(k simkubelet.Snapshot) int {
	count := 0
	for _, r := range k.Resources {
		count += r.Allocatable
	}
	return count
}

// standsBy waits until the process is ready, beside the one that serves.
func (p *process) standsBy(ctx context.Context) error {
	for late := time.Now().Add(patience); ; {
		_, err := p.get("/readyz")
		if err == nil || time.Now().After(late) {
			return err
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

// alone starts a virgate without a control socket, of which two would want one.
func (s *stage) alone(ctx context.Context) (*process, error) {
	return s.run(ctx, append(s.configured(), "--control-socket", "")...)
}
