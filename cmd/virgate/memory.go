package main

import (
	"context"
	"runtime/debug"
	"time"
)

const (
	// settled is after which the start is over, and its garbage is given back.
	settled = 10 * time.Second
	// startPercent and restPercent are by how much the heap may grow between two
	// collections; Go's own is 100. The start collects only near startLimit: that
	// would be a quarter of its work. At rest the heap is a few megabytes that live
	// long, and little is made.
	startPercent, restPercent = -1, 50
	// startLimit bounds the garbage of the start, in bytes. The longest list needs
	// half of it, and the chart's limit is twice as much.
	startLimit = 128 << 20
)

// collectRarely lets the heap grow during the start, and returns what ends that:
// it waits so long, gives back what the start alone has needed, and has the
// collector keep to it; or returns when ctx ends. It never fails. Where the
// user's $GOGC says how the collector is to work, it does so throughout, and a
// $GOMEMLIMIT below startLimit holds.
func collectRarely(environment environment, start time.Duration) func(context.Context) error {
	percent, _ := environment("GOGC")
	limit := debug.SetMemoryLimit(-1)
	if percent == "" {
		debug.SetGCPercent(startPercent)
		debug.SetMemoryLimit(min(limit, startLimit))
	}
	return func(ctx context.Context) error {
		timer := time.NewTimer(start)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		if percent == "" {
			debug.SetGCPercent(restPercent)
			debug.SetMemoryLimit(limit)
		}
		debug.FreeOSMemory()
		forgetStart()
		return nil
	}
}
