package main

import (
	"context"
	"fmt"
	"sync"
)

const (
	// preferred is how many devices are requested; more than any container needs.
	preferred = 64
	// callers is the number of callers at the same time.
	callers = 8
)

// calls measures the kubelet's calls over the plugin's socket, each beside one that does nothing on
// the same connection. Both take the same way through the kernel and gRPC, so their ratio is the
// plugin's own part.
func calls(ctx context.Context, b bench) ([]figure, error) {
	return ofSizes(ctx, b, "calls", callsOf)
}

func callsOf(ctx context.Context, b bench, devices int) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.share(devices); err != nil {
		return nil, err
	}
	virgate, err := s.run(ctx, s.configured()...)
	if err != nil {
		return nil, err
	}
	if err := s.shows(ctx, devices); err != nil {
		return nil, err
	}
	p, err := s.dial()
	if err != nil {
		return nil, err
	}
	defer p.close()
	var figures []figure
	for _, part := range []func(context.Context, bench, *process, plugin) ([]figure, error){allocation, crowd, preference, looks} {
		found, err := part(ctx, b, virgate, p)
		if err != nil {
			return nil, err
		}
		figures = append(figures, found...)
	}
	kept, err := footprint(virgate)
	if err != nil {
		return nil, err
	}
	return prefixed(fmt.Sprintf("calls/%d", devices), append(figures, kept...)), virgate.stop()
}

// allocation measures Allocate with one caller.
func allocation(ctx context.Context, b bench, virgate *process, p plugin) ([]figure, error) {
	var empty, full sample
	for i := range b.rounds(1500) {
		if err := empty.timed(func() error { return p.empty(ctx) }); err != nil {
			return nil, err
		}
		if err := full.timed(func() error { return p.allocate(ctx, i) }); err != nil {
			return nil, err
		}
	}
	var asked, idle counts
	for range b.rounds(7) {
		if err := asked.counted(virgate, func() error {
			return repeat(batch, func(i int) error { return p.allocate(ctx, i) })
		}); err != nil {
			return nil, err
		}
		if err := idle.counted(virgate, func() error {
			return repeat(batch, func(int) error { return p.empty(ctx) })
		}); err != nil {
			return nil, err
		}
	}
	return []figure{
		{"empty", microseconds(empty.median()), "µs"},
		{"allocate", microseconds(full.median()), "µs"},
		{"allocate-ratio", full.over(empty), "×"},
		{"allocate-objects", (asked.median() - idle.median()) / batch, ""},
	}, nil
}

// batch is the number of calls that are made to count the objects of one. It is so large that the
// two scrapes around the calls, whose objects differ by thousands, matter little.
const batch = 2000

func repeat(times int, call func(i int) error) error {
	for i := range times {
		if err := call(i); err != nil {
			return err
		}
	}
	return nil
}

// crowd measures Allocate with several callers at once.
func crowd(ctx context.Context, b bench, _ *process, p plugin) ([]figure, error) {
	var empty, full [callers]sample
	var errs [callers]error
	var asking sync.WaitGroup
	for caller := range callers {
		asking.Go(func() {
			errs[caller] = repeat(b.rounds(200), func(i int) error {
				if err := empty[caller].timed(func() error { return p.empty(ctx) }); err != nil {
					return err
				}
				return full[caller].timed(func() error { return p.allocate(ctx, callers*i+caller) })
			})
		})
	}
	asking.Wait()
	var allEmpty, allFull sample
	for caller := range callers {
		if errs[caller] != nil {
			return nil, errs[caller]
		}
		allEmpty, allFull = append(allEmpty, empty[caller]...), append(allFull, full[caller]...)
	}
	return []figure{
		{"allocate-by-8", microseconds(allFull.median()), "µs"},
		{"allocate-by-8-p99", microseconds(allFull.quantile(0.99)), "µs"},
		{"allocate-by-8-ratio", allFull.over(allEmpty), "×"},
	}, nil
}

// preference measures GetPreferredAllocation with one caller and all devices free.
func preference(ctx context.Context, b bench, _ *process, p plugin) ([]figure, error) {
	var decoded, chosen sample
	for range b.rounds(150) {
		if err := decoded.timed(func() error { return p.prefer(ctx, 0) }); err != nil {
			return nil, err
		}
		if err := chosen.timed(func() error { return p.prefer(ctx, preferred) }); err != nil {
			return nil, err
		}
	}
	return []figure{
		{"decode", microseconds(decoded.median()), "µs"},
		{"prefer", microseconds(chosen.median()), "µs"},
		{"prefer-ratio", chosen.over(decoded), "×"},
	}, nil
}
