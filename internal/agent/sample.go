package agent

import (
	"context"
	"maps"
	"time"

	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

// Meter measures how the boards are used, and by which containers.
type Meter interface {
	// Measure measures now, which may take seconds, and returns soon after ctx
	// ends. One goroutine calls it; what it returns is not changed afterwards.
	Measure(ctx context.Context) sharing.Measurement
}

// defaultSample is the time between two samples where Options has none.
const defaultSample = 5 * time.Second

// observation is what the last sample found, with the counters so far. It is
// immutable.
type observation struct {
	// at is when the sample was taken; zero before the first.
	at     time.Time
	report sharing.UseReport
	// contended, attribution and sources are as in metrics.UseState.
	contended   map[string]time.Duration
	attribution map[sharing.UseStage]uint64
	sources     map[string]uint64
}

// The sources of a sample.
const (
	driverSource  = "driver"
	kubeletSource = "kubelet"
)

func newObservation() *observation {
	first := &observation{
		contended:   map[string]time.Duration{},
		attribution: map[sharing.UseStage]uint64{},
		sources:     map[string]uint64{driverSource: 0, kubeletSource: 0},
	}
	for _, stage := range sharing.UseStages() {
		first.attribution[stage] = 0
	}
	return first
}

// sample keeps current who holds what and how the boards are used. What cannot
// be read is absent, not old.
func (a *agent) sample(ctx context.Context) error {
	interval := a.SampleInterval
	if interval <= 0 {
		interval = defaultSample
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		a.observe(ctx, interval)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// observe takes one sample.
func (a *agent) observe(ctx context.Context, interval time.Duration) {
	last := a.observed.Load()
	next := &observation{
		contended: maps.Clone(last.contended), attribution: maps.Clone(last.attribution), sources: maps.Clone(last.sources),
	}
	held, known := a.observeHolders(ctx, next)
	if a.Meter != nil {
		measured := a.Meter.Measure(ctx)
		if ctx.Err() != nil {
			return
		}
		for stage, count := range measured.Errors {
			next.attribution[stage] += uint64(count)
		}
		if measured.Errors[sharing.StageDriver] > 0 {
			next.sources[driverSource]++
		}
		s := a.state.Load()
		next.report = sharing.NewUseReport(measured, s.gpus, s.plan.Resources, held, known)
	}
	next.at = time.Now()
	next.count(last, interval)
	a.observed.Store(next)
}

// observeHolders asks who holds what.
func (a *agent) observeHolders(ctx context.Context, next *observation) (held []sharing.Allocation, known bool) {
	if a.Holders == nil {
		return nil, false
	}
	held, err := a.Holders.Held(ctx)
	if err != nil {
		a.allocations.Store(nil)
		next.sources[kubeletSource]++
		next.attribution[sharing.StagePods]++
		return nil, false
	}
	a.allocations.Store(&held)
	return held, true
}

// count adds the time since the last sample where a board is contended now. A
// sample that came late says nothing about more than two intervals.
func (o *observation) count(last *observation, interval time.Duration) {
	if o.report.Attributed {
		for _, board := range o.report.Boards {
			if board.SM.Known {
				o.contended[board.GPU] += 0 // Counted from here on, so that the first increase shows.
			}
		}
	}
	if last.at.IsZero() {
		return
	}
	since := min(o.at.Sub(last.at), 2*interval)
	for _, contention := range o.report.Contention {
		if contention.Contended {
			o.contended[contention.GPU] += since
		}
	}
}

// Sharing implements metrics.Source.
func (s source) Sharing() metrics.State {
	decided := s.state.Load()
	state := metrics.State{GPUs: decided.gpus, Resources: decided.plan.Resources}
	if held := s.allocations.Load(); held != nil {
		state.Allocations, state.AllocationsKnown = *held, true
	}
	for _, r := range s.Plugin.Status().Resources {
		listing := sharing.Listing{Resource: r.Name, Devices: make([]sharing.Device, len(r.Listed))}
		for i, entry := range r.Listed {
			listing.Devices[i] = entry.Device
		}
		state.Listings = append(state.Listings, listing)
	}
	return state
}

// Use implements metrics.UseSource.
func (s source) Use() metrics.UseState {
	last := s.observed.Load()
	use := metrics.UseState{
		Report: last.report, Contended: last.contended, AttributionErrors: last.attribution, SampleErrors: last.sources,
	}
	if !last.at.IsZero() {
		use.Age, use.Sampled = time.Since(last.at), true
	}
	return use
}
