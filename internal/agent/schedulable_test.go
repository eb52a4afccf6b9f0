package agent

import (
	"context"
	"maps"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// planOf has so many Healthy devices of each resource.
func planOf(healthy map[string]int) (plan sharing.Plan) {
	for name, count := range healthy {
		r := sharing.Resource{Name: name}
		for range count {
			r.Devices = append(r.Devices, sharing.Device{Healthy: true})
		}
		plan.Resources = append(plan.Resources, r)
	}
	return plan
}

// TestSwitchState checks when a change of the profile is over.
func TestSwitchState(t *testing.T) {
	t.Parallel()
	type counts = map[string]int
	served := func(resources ...plugin.ResourceStatus) plugin.Status {
		return plugin.Status{Served: true, Switched: true, Resources: resources}
	}
	a := plugin.ResourceStatus{Name: "a", Applied: true, AnnounceState: plugin.Announced}
	b := plugin.ResourceStatus{Name: "b", Applied: true, AnnounceState: plugin.Announced}
	on, untold := a, a
	on.Applied, on.AnnounceState = false, plugin.Announcing
	untold.AnnounceState = plugin.Unannounced
	told := a
	told.AnnounceState = plugin.Announcing
	for _, test := range []struct {
		name          string
		before, after counts
		status        plugin.Status
		pending       bool
		want          switchState
	}{
		{"told", counts{"a": 8}, counts{"a": 4}, served(a), false, switchAgrees},
		{"another plan is served yet", counts{"a": 8}, counts{"a": 4}, plugin.Status{Switched: true, Resources: []plugin.ResourceStatus{a}}, false, switchGoesOn},
		{"free units are on their way", counts{"a": 8}, counts{"a": 4}, plugin.Status{Served: true, Resources: []plugin.ResourceStatus{a}}, false, switchGoesOn},
		{"partitions are being made", counts{"a": 8}, counts{"a": 4}, served(a), true, switchGoesOn},
		{"the kubelet has not applied it", counts{"a": 8}, counts{"a": 4}, served(on), false, switchGoesOn},
		{"the kubelet has, the API server not", counts{"a": 8}, counts{"a": 4}, served(told), false, switchGoesOn},
		{"it cannot be written", counts{"a": 8}, counts{"a": 4}, served(untold), false, switchUntold},
		{"another resource cannot be written", counts{"a": 8, "b": 2}, counts{"a": 8, "b": 4}, served(untold, b), false, switchAgrees},
		{"one of two is told", counts{"a": 8, "b": 2}, counts{"a": 6, "b": 4}, served(told, b), false, switchGoesOn},
		{"no number changes", counts{"a": 8}, counts{"a": 8}, served(a), false, switchUntold},
		{"a resource is gone", counts{"a": 8, "b": 2}, counts{"b": 10}, served(b), false, switchAgrees},
		{"a resource is new", counts{"a": 8}, counts{"b": 8}, served(a, b), false, switchAgrees},
		{"pods hold all that is to have the new name", counts{"a": 8}, counts{"b": 8}, served(a), false, switchAgrees},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			if got := (profileChange{before: test.before}).state(planOf(test.after), test.status, test.pending); got != test.want {
				t.Errorf("got %d, want %d", got, test.want)
			}
		})
	}
}

// TestStartsMPS checks that a unit waits for its daemon while the daemon starts or ends, but not while the daemon
// waits for pods.
func TestStartsMPS(t *testing.T) {
	t.Parallel()
	shares := sharing.Unit{ID: "u", Health: sharing.Faulty("not ready"), MPS: sharing.MPS{Shares: 2}}
	whole := sharing.Unit{ID: "u", Health: sharing.Faulty("its MPS daemon is still running")}
	in := func(phase nodereport.MPSPhase) decide.MPS {
		return decide.MPS{Connected: true, States: map[string]nodereport.MPSState{"u": {ID: "u", Phase: phase}}}
	}
	waits, busy := in(nodereport.MPSStarting), in(nodereport.MPSStopping)
	waits.Waits, busy.Busy = map[string]string{"u": "a pod has it"}, map[string]bool{"u": true}
	ready := shares
	ready.Health = sharing.Health{}
	held := []nodereport.Wait{{Unit: "u"}}
	for _, test := range []struct {
		name  string
		unit  sharing.Unit
		mps   decide.MPS
		waits []nodereport.Wait
		want  bool
	}{
		{"not asked for yet", shares, decide.MPS{Connected: true}, nil, true},
		{"starts", shares, in(nodereport.MPSStarting), nil, true},
		{"ready, and not planned so yet", shares, in(nodereport.MPSReady), nil, true},
		{"planned", ready, in(nodereport.MPSReady), nil, false},
		{"failed", shares, in(nodereport.MPSFailed), nil, false},
		{"nobody runs daemons", shares, decide.MPS{}, nil, false},
		{"a pod has the GPU", shares, waits, nil, false},
		{"ends", whole, busy, nil, true},
		{"a pod has a share", whole, busy, held, false},
		{"another fault", whole, in(nodereport.MPSStopping), nil, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			plan := sharing.Plan{Resources: []sharing.Resource{{Name: "a", Units: []sharing.Unit{test.unit}}}}
			if got := startsMPS(plan, &test.mps, test.waits); got != test.want {
				t.Errorf("got %t, want %t", got, test.want)
			}
		})
	}
}

// scheduler is the API server that the scheduler sees.
type scheduler struct {
	mu      sync.Mutex
	numbers map[string]int
	refuses bool
}

func (s *scheduler) Announce(_ context.Context, _, allocatable map[string]int) map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	written := map[string]bool{}
	for name := range allocatable {
		written[name] = !s.refuses
	}
	if !s.refuses {
		maps.Copy(s.numbers, allocatable)
	}
	return written
}

func (s *scheduler) refuse(refuses bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuses = refuses
}

func (s *scheduler) knows(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.numbers[name]
}

// measured returns how many changes of the profile were measured, and their total time.
func (r *rig) measured() (count uint64, seconds float64) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.agent.view.switches)
	families, err := registry.Gather()
	r.must(err)
	histogram := families[0].Metric[0].Histogram
	return histogram.GetSampleCount(), histogram.GetSampleSum()
}

// TestSwitchIsMeasured checks that each profile that changes a number is measured once, when the scheduler knows
// the number. The first profile is not measured, nor is a number that cannot be written.
func TestSwitchIsMeasured(t *testing.T) {
	t.Parallel()
	scheduler := &scheduler{numbers: map[string]int{}}
	policy, reporter := selectedPolicy{newInput(named(4, "g1"), nil)}, newFakeReporter()
	r := newRig(t, func(r *rig) {
		r.options.ConfigSource, r.options.Reporter = policy, reporter
		r.options.Plugin = plugin.NewManager(plugin.Options{
			Dir: r.dir, Kubelet: r.sight, Logger: r.options.Logger, Timing: pluginTiming(), Announcer: scheduler,
		})
	})
	applied := func(generation string) {
		t.Helper()
		reporter.await(t, generation, func(report nodereport.Report) bool { return report.Applied.Generation == generation })
	}
	applied("g1")
	r.await("the first number", func() bool { return scheduler.knows(gpuResource) == 8 })
	for i, step := range []struct {
		generation string
		replicas   int
		refused    bool
		want       uint64
	}{
		{"g2", 6, false, 1},
		{"g3", 6, false, 1}, // The number is the same.
		{"g4", 3, false, 2},
		{"g5", 5, true, 2},
		{"g6", 7, false, 3},
	} {
		scheduler.refuse(step.refused)
		policy.set(named(step.replicas, step.generation), nil)
		applied(step.generation)
		r.await("the change to be measured", func() bool {
			count, _ := r.measured()
			knows := scheduler.knows(gpuResource) == 2*step.replicas
			if count > step.want || count == step.want && !knows && !step.refused {
				t.Fatalf("step %d: %d measured, %d devices known to the scheduler", i, count, scheduler.knows(gpuResource))
			}
			return count == step.want
		})
	}
	if _, seconds := r.measured(); seconds <= 0 || seconds > patience.Seconds() {
		t.Errorf("measured %v s in all", seconds)
	}
}
