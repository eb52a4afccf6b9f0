package main

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
)

// startup measures from before the process is made to the moment in which the
// kubelet has the list, beside a process of the same binary that only says its
// version. Both take turns.
func startup(ctx context.Context, b bench) ([]figure, error) {
	var figures []figure
	for _, devices := range sizes {
		found, err := startupOf(ctx, b, devices)
		if err != nil {
			return nil, fmt.Errorf("start with %d devices: %w", devices, err)
		}
		figures = append(figures, found...)
	}
	return figures, nil
}

func startupOf(ctx context.Context, b bench, devices int) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.share(devices); err != nil {
		return nil, err
	}
	var bare, bareWork, advertised, work, kubelet sample
	var objects, goroutines, own, all float64
	for range b.rounds(10) {
		version := exec.CommandContext(ctx, b.binary, "version")
		if err := bare.timed(version.Run); err != nil {
			return nil, err
		}
		bareWork = append(bareWork, version.ProcessState.UserTime()+version.ProcessState.SystemTime())
		runtime.GC() // So that this process's garbage is nobody's time.
		before, err := ownWork()
		if err != nil {
			return nil, err
		}
		var p *process
		if err := advertised.timed(func() error {
			if p, err = s.run(ctx, s.configured()...); err != nil {
				return err
			}
			return s.shows(ctx, devices)
		}); err != nil {
			return nil, err
		}
		after, err := ownWork()
		if err != nil {
			return nil, err
		}
		kubelet = append(kubelet, after-before)
		done, err := p.work()
		if err != nil {
			return nil, err
		}
		work = append(work, done.cpu)
		resident, err := p.memory()
		if err != nil {
			return nil, err
		}
		own, all = megabytes(resident.own), megabytes(resident.all)
		if objects, err = p.series("go_memstats_mallocs_total"); err != nil {
			return nil, err
		}
		if goroutines, err = p.series("go_goroutines"); err != nil {
			return nil, err
		}
		if err := p.stop(); err != nil {
			return nil, err
		}
		if err := s.forget(ctx); err != nil {
			return nil, err
		}
	}
	name := func(what string) string { return fmt.Sprintf("start/%d/%s", devices, what) }
	return []figure{
		{name("process"), milliseconds(bare.median()), "ms"},
		{name("advertised"), milliseconds(advertised.median()), "ms"},
		{name("over-process"), milliseconds(advertised.median() - bare.median()), "ms"},
		{name("least-over-process"), milliseconds(advertised.quantile(0) - bare.quantile(0)), "ms"},
		{name("kubelet-cpu"), milliseconds(kubelet.median()), "ms"},
		{name("processes"), advertised.over(bare), "×"},
		{name("cpu"), milliseconds(work.median() - bareWork.median()), "ms"},
		{name("objects"), objects, ""},
		{name("goroutines"), goroutines, ""},
		{name("own"), own, "MB"},
		{name("resident"), all, "MB"},
	}, nil
}
