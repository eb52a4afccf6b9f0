package main

import (
	"context"
	"math"
	"runtime/debug"
	"testing"
	"time"
)

func TestCollectRarely(t *testing.T) {
	type setting struct {
		percent int
		limit   int64
	}
	ended, end := context.WithCancel(t.Context())
	end()
	usual := setting{100, math.MaxInt64}
	for _, test := range []struct {
		name          string
		gogc          string
		before        setting
		ctx           context.Context
		length        time.Duration
		started, rest setting
	}{
		{"by itself", "", usual, t.Context(), 0, setting{startPercent, startLimit}, setting{restPercent, math.MaxInt64}},
		{"as $GOGC says", "80", setting{80, math.MaxInt64}, t.Context(), 0, setting{80, math.MaxInt64}, setting{80, math.MaxInt64}},
		{"under a lower $GOMEMLIMIT", "", setting{100, 64 << 20}, t.Context(), 0, setting{startPercent, 64 << 20}, setting{restPercent, 64 << 20}},
		{"ended before", "", usual, ended, time.Hour, setting{startPercent, startLimit}, setting{startPercent, startLimit}},
	} {
		t.Run(test.name, func(t *testing.T) {
			percent, limit := debug.SetGCPercent(test.before.percent), debug.SetMemoryLimit(test.before.limit)
			defer func() { debug.SetGCPercent(percent); debug.SetMemoryLimit(limit) }()
			now := func() setting {
				percent := debug.SetGCPercent(100)
				debug.SetGCPercent(percent)
				return setting{percent, debug.SetMemoryLimit(-1)}
			}
			rest := collectRarely(func(name string) (string, bool) { return test.gogc, name == "GOGC" && test.gogc != "" }, test.length)
			if got := now(); got != test.started {
				t.Errorf("during the start %v, want %v", got, test.started)
			}
			if err := rest(test.ctx); err != nil {
				t.Fatal(err)
			}
			if got := now(); got != test.rest {
				t.Errorf("afterwards %v, want %v", got, test.rest)
			}
		})
	}
}
