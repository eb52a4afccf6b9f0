package nvml_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

const (
	joins = "joins the fabric of NVLinks"
	not   = "not in the fabric of NVLinks"
	// probes is longer than it takes to see a change and to recover from it.
	probes = time.Minute
	// again is longer than the second recovery of a GPU takes.
	again = 6 * time.Minute
)

var (
	completed = nvml.FabricInfo{State: nvml.FabricCompleted, HealthSummary: nvml.FabricHealthy}
	progress  = nvml.FabricInfo{State: nvml.FabricInProgress}
)

func inFabric(t *testing.T) *simnode.Node {
	t.Helper()
	sim := simulate(t, "h100x2")
	must(t, sim.SetWorld("fabric"))
	return sim
}

// TestJoiningTheFabric checks that a GPU is offered only once it has joined the fabric of NVLinks, also after a
// reset. A GPU that was offered and joins anew without a reset is faulty only if that lasts.
func TestJoiningTheFabric(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := inFabric(t)
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		w.expect("at first", map[string]string{"0": joins, "1": joins})
		must(t, sim.SetFabric(0, completed))
		after(probes)
		w.expect("when GPU 0 has joined", map[string]string{"1": joins})
		after(5 * time.Minute)
		w.expect("after five minutes", map[string]string{"1": not})
		must(t, sim.SetFabric(1, completed))
		after(probes)
		w.expect("when GPU 1 has joined late", nil)

		must(t, sim.SetFabric(1, progress))
		after(4 * time.Minute)
		w.expect("when GPU 1 joins anew", nil)
		after(2 * time.Minute)
		w.expect("when that lasts", map[string]string{"1": not})
		must(t, sim.SetFabric(1, completed))
		after(again)
		w.expect("when it has joined again", nil)

		must(t, sim.Heal(1))
		after(probes)
		w.expect("after a reset", map[string]string{"1": joins})
		must(t, sim.SetFabric(1, completed))
		after(probes)
		w.expect("when it has joined after the reset", nil)

		// Our own reset.
		gpu := sim.GPUs()[0].UUID
		if _, err := w.Release(context.Background(), gpu); err != nil || !isClosed(sim, 0) {
			t.Fatalf("not released and reset: %v", err)
		}
		must(t, w.Restore(context.Background(), gpu, true))
		after(probes)
		w.expect("after our own reset", map[string]string{"0": joins})
		must(t, sim.SetFabric(0, completed))
		after(probes)
		w.expect("in the end", nil)
	})
}

// TestFabricFaults checks which states of a joined GPU are faults, the text of each, and that values unknown to
// nvml.h are not interpreted.
func TestFabricFaults(t *testing.T) {
	for _, test := range []struct {
		fabric nvml.FabricInfo
		want   string
	}{
		{nvml.FabricInfo{}, ""},
		{nvml.FabricInfo{State: nvml.FabricNotStarted}, joins},
		{completed, ""},
		{nvml.FabricInfo{State: nvml.FabricCompleted}, ""}, // From a driver that reports no health.
		{nvml.FabricInfo{State: nvml.FabricCompleted, HealthSummary: nvml.FabricLimitedCapacity}, ""},
		{nvml.FabricInfo{State: nvml.FabricCompleted, Status: nvml.Unknown}, "did not join the fabric of NVLinks: UNKNOWN"},
		{nvml.FabricInfo{State: nvml.FabricCompleted, HealthSummary: nvml.FabricUnhealthy}, "its fabric of NVLinks is unhealthy"},
		{
			nvml.FabricInfo{State: nvml.FabricCompleted, HealthSummary: nvml.FabricUnhealthy, HealthMask: 1 | 1<<2 | 1<<4 | 5<<8},
			"its fabric of NVLinks is unhealthy: degraded bandwidth, unhealthy route, insufficient NVLinks",
		},
		{
			nvml.FabricInfo{State: nvml.FabricCompleted, HealthSummary: nvml.FabricUnhealthy, HealthMask: 2 | 2<<4 | 9<<8},
			"its fabric of NVLinks is unhealthy: configuration 9",
		},
		{nvml.FabricInfo{State: nvml.FabricCompleted, HealthSummary: 4}, "fabric of NVLinks: unknown health summary 4"},
		{nvml.FabricInfo{State: 4}, "fabric of NVLinks: unknown state 4"},
	} {
		t.Run(fmt.Sprintf("%+v", test.fabric), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := inFabric(t)
				must(t, sim.SetFabric(0, completed))
				must(t, sim.SetFabric(1, test.fabric))
				w := watch(t, sim)
				want := map[string]string{}
				if test.want != "" {
					want["1"] = test.want
				}
				w.expect("at first", want)
				if test.want == "" {
					return
				}
				if n := len(w.Health().Transitions); n != 1 {
					t.Errorf("%d changes of health, want one", n)
				}
				rules := sharing.DefaultHealthRules()
				rules.IgnoreFabric = true
				w.SetHealthRules(rules)
				after(probes)
				w.expect("when fabrics are ignored", nil)
				w.SetHealthRules(sharing.DefaultHealthRules())
				after(probes)
				w.expect("when they no longer are", want)
				must(t, sim.SetFabric(1, completed))
				after(again)
				w.expect("when it is over", nil)
			})
		})
	}
}

// TestConfidentialComputing checks that no GPU is offered before the ready state is set, nor after an operator
// has reset it.
func TestConfidentialComputing(t *testing.T) {
	const notReady = "confidential computing: the ready state is not set"
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h100x2")
		must(t, sim.SetWorld("confidential"))
		w := watch(t, sim)
		for _, step := range []struct {
			ready uint32
			want  string
		}{{0, notReady}, {1, ""}, {0, notReady}, {2, "confidential computing: unknown ready state 2"}, {1, ""}} {
			sim.SetReady(step.ready)
			after(again)
			want := map[string]string{}
			if step.want != "" {
				want = map[string]string{"0": step.want, "1": step.want}
			}
			w.expect(fmt.Sprintf("in state %d", step.ready), want)
		}
	})
}
