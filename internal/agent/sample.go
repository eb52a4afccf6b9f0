package agent

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

// utilizationSample is a sample's result, with the counters so far. It is immutable.
type utilizationSample struct {
	metrics.UtilizationState
	// at is when the sample was taken; zero before the first.
	at time.Time
}

// The sources of a sample.
const (
	driverSource  = "driver"
	kubeletSource = "kubelet"
)

func firstSample() *utilizationSample {
	var first utilizationSample
	first.Contended = map[string]time.Duration{}
	first.AttributionErrors = map[sharing.AttributionStage]uint64{}
	first.SampleErrors = map[string]uint64{driverSource: 0, kubeletSource: 0}
	for _, stage := range sharing.AttributionStages() {
		first.AttributionErrors[stage] = 0
	}
	return &first
}

// sampler keeps the holders and the use of the GPUs up to date. What cannot be read now is unknown;
// no older value replaces it.
type sampler struct {
	*current
	plugin  *plugin.Manager
	kubelet plugin.Kubelet
	measure func(ctx context.Context) sharing.Measurement
	guard   *memoryguard.Guard
	// interval is the time between two samples.
	interval time.Duration
	// holders is nil while the holders are unknown; asking is held by the goroutine that reads
	// them.
	holders atomic.Pointer[holding]
	asking  chan struct{}
	last    atomic.Pointer[utilizationSample]
}

func newSampler(a *agent) *sampler {
	s := &sampler{
		current:  &a.current,
		plugin:   a.Plugin,
		kubelet:  a.Kubelet,
		measure:  a.Measure,
		guard:    a.guard,
		interval: cmp.Or(max(a.SampleInterval, 0), 5*time.Second),
		asking:   make(chan struct{}, 1),
	}
	s.last.Store(firstSample())
	return s
}

// run takes samples until ctx ends.
func (s *sampler) run(ctx context.Context) error {
	tick := time.NewTicker(s.interval)
	defer tick.Stop()
	for {
		s.take(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (s *sampler) take(ctx context.Context) {
	last := s.last.Load()
	next := &utilizationSample{UtilizationState: metrics.UtilizationState{
		Contended:         maps.Clone(last.Contended),
		AttributionErrors: maps.Clone(last.AttributionErrors),
		SampleErrors:      maps.Clone(last.SampleErrors),
	}}
	held, known := s.readHolders(ctx, 0)
	if !known {
		next.SampleErrors[kubeletSource]++
		next.AttributionErrors[sharing.StagePods]++
	}
	measured := s.measure(ctx)
	if ctx.Err() != nil {
		return
	}
	for stage, count := range measured.Errors {
		next.AttributionErrors[stage] += uint64(count)
	}
	if measured.Errors[sharing.StageDriver] > 0 {
		next.SampleErrors[driverSource]++
	}
	decided := s.state.Load()
	shown := status.Listed(s.plugin.Status().Resources, decided.gpus)
	next.Report = sharing.NewUtilizationReport(measured, decided.gpus, shown, held, known)
	next.at = time.Now()
	s.guard.Look(memoryguard.Sample{
		Report:   next.Report,
		GPUs:     decided.gpus,
		Planned:  decided.plan.Resources,
		Listed:   shown,
		Held:     held,
		At:       next.at,
		Interval: s.interval,
	})
	next.countContention(last, s.interval)
	s.last.Store(next)
}

// holding is the kubelet's answer, with the time when it was asked.
type holding struct {
	at   time.Time
	held []sharing.Allocation
}

// readHolders reads the holders, at least pause after the last time. If there is no answer before
// the deadline of ctx, the last one stays.
func (s *sampler) readHolders(ctx context.Context, pause time.Duration) (held []sharing.Allocation, known bool) {
	came := time.Now()
	select {
	case s.asking <- struct{}{}:
		defer func() { <-s.asking }()
	case <-ctx.Done():
		return nil, false
	}
	if last := s.holders.Load(); last != nil && !last.at.Before(came) {
		return last.held, true // Another caller has read them meanwhile.
	} else if last != nil {
		if !wake.Sleep(ctx, time.Until(last.at.Add(pause))) {
			return nil, false
		}
	}
	began := time.Now()
	held, err := s.kubelet.Held(ctx)
	switch {
	case err == nil:
		s.holders.Store(&holding{began, held})
	case ctx.Err() == nil:
		s.holders.Store(nil)
	}
	return held, err == nil
}

// countContention adds the time since the last sample for GPUs that are contended now, at most two
// intervals: a late sample proves no more than that.
func (o *utilizationSample) countContention(last *utilizationSample, interval time.Duration) {
	if o.Report.Attributed {
		for _, gpu := range o.Report.GPUs {
			if gpu.SM != nil {
				o.Contended[gpu.GPU] += 0 // Start at 0, so that the first increase shows.
			}
		}
	}
	if last.at.IsZero() {
		return
	}
	since := min(o.at.Sub(last.at), 2*interval)
	for _, contention := range o.Report.Contention {
		if contention.Contended {
			o.Contended[contention.GPU] += since
		}
	}
}

// sharing returns what the node offers and who holds it, for the metrics.
func (s *sampler) sharing() metrics.State {
	decided := s.state.Load()
	state := metrics.State{
		GPUs:    decided.gpus,
		Planned: decided.plan.Resources,
		Listed:  status.Listed(s.plugin.Status().Resources, decided.gpus),
	}
	if known := s.holders.Load(); known != nil {
		ofAnyGPU := func(a sharing.Allocation) bool { return a.AnyGPU } // It would count for each.
		state.Allocations, state.AllocationsKnown = slices.DeleteFunc(slices.Clone(known.held), ofAnyGPU), true
	}
	return state
}

// utilization returns the last sample, for the metrics.
func (s *sampler) utilization() metrics.UtilizationState {
	last := s.last.Load()
	use := last.UtilizationState
	use.Sampled = !last.at.IsZero()
	if use.Sampled {
		use.Age = time.Since(last.at)
	}
	return use
}
