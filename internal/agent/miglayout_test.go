package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/kubelettest"
	"github.com/virgate/virgate/test/shortdir"
)

// migRig is the whole program without its command line, between a simulated driver and a simulated kubelet. The
// kubelet reports each breach of the contract, such as a Healthy device that leaves a list.
type migRig struct {
	*rig
	sim    *simnode.Node
	policy fakePolicy
	seen   *seeing
	// managing holds the options of its plugin manager.
	managing plugin.Options
}

func newMIGRig(t *testing.T, node string, wanted sharing.MIGConfig, adjust ...func(*Options)) *migRig {
	t.Helper()
	timing := plugin.Timing{RemovalDelay: 100 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 2 * time.Second}
	return newTimedMIGRig(t, node, migProfile(wanted), timing, adjust...)
}

func newTimedMIGRig(t *testing.T, node string, profile sharing.Profile, timing plugin.Timing, adjust ...func(*Options)) *migRig {
	t.Helper()
	sim, err := simnode.New(node)
	if err != nil {
		t.Fatal(err)
	}
	socket := shortdir.New(t)
	c := &migRig{sim: sim, policy: fakePolicy{newInput(profile, nil)}}
	c.rig = newRig(t, func(r *rig) {
		dir := shortdir.New(t)
		log := slog.New(slog.DiscardHandler)
		if testing.Verbose() {
			log = slog.New(slog.NewTextHandler(os.Stderr, nil))
		}
		r.kubelet = kubelettest.New(simkubelet.Options{
			Dir: dir, PodResourcesSocket: filepath.Join(socket, "pr.sock"),
			OnViolation: func(message string) { t.Errorf("kubelet's contract broken: %s", message) },
		})
		sight := podresources.New(podresources.Options{
			Socket: filepath.Join(socket, "pr.sock"), CheckpointDir: dir, Logger: log, Timeout: patience,
		})
		t.Cleanup(func() { _ = sight.Close() })
		n := nvml.NewNode(sim, nvml.Options{Logger: log})
		r.options.Node, r.options.ConfigSource, r.options.Logger, r.options.Kubelet = n, c.policy, log, sight
		c.seen = &seeing{Kubelet: sight, held: make(chan []sharing.Allocation, 1)}
		c.managing = plugin.Options{Dir: dir, Kubelet: c.seen, Logger: log, Timing: timing}
		r.options.Plugin = plugin.NewManager(c.managing)
		r.options.Partitioner, r.options.CloseHandles = nvml.NewPartitioner(sim, n.PauseEvents), n.PauseEvents
		r.options.Refresh = n.Refresh
		for _, a := range adjust {
			a(&r.options)
		}
	})
	return c
}

func migProfile(wanted sharing.MIGConfig) sharing.Profile {
	return sharing.Profile{
		MIGStrategy: sharing.MIGMixed, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames: []sharing.NamingRule{{Pattern: "*", Name: gpuResource}}, MIG: wanted,
	}
}

func (c *migRig) want(layout string) { c.policy.set(migProfile(layoutNamed(layout)), nil) }

// awaitLayout waits until the GPU's layout is in this state.
func (c *migRig) awaitLayout(name string, state nodereport.LayoutState) {
	c.t.Helper()
	c.awaitLayouts(name+" "+string(state), func(l nodereport.GPULayout) bool { return l.Wanted == name && l.State == state })
}

func (c *migRig) awaitLayouts(what string, so func(nodereport.GPULayout) bool) {
	c.t.Helper()
	c.until("layout "+what, func() error {
		if layouts := c.agent.mig.Status(); len(layouts) == 0 || !so(layouts[0]) {
			return fmt.Errorf("layouts %+v", layouts)
		}
		return nil
	})
}

func (c *migRig) awaitAllocatable(resource string, count int) {
	c.t.Helper()
	if err := c.kubelet.Await(c.ctx, func(k simkubelet.Snapshot) bool { return k.Resources[resource].Allocatable == count }); err != nil {
		c.t.Fatalf("%s: %+v, want %d allocatable", resource, c.kubelet.Snapshot().Resources, count)
	}
}

func migPod(name, resource string, count int) simkubelet.Pod {
	return simkubelet.Pod{
		Namespace: "default", Name: name,
		Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{resource: count}}},
	}
}

const (
	oneG   = "nvidia.com/mig-1g.10gb"
	threeG = "nvidia.com/mig-3g.40gb"
)

// TestMIGChangeUnderLoad checks that pods on kept partitions keep them while the rest of the GPU is repartitioned
// back and forth under constant admissions, and that the layout is complete once nothing is in the way.
func TestMIGChangeUnderLoad(t *testing.T) {
	t.Parallel()
	c := newMIGRig(t, "h100", layoutNamed("all-1g.10gb"))
	c.awaitAllocatable(oneG, 7)
	status, err := c.kubelet.AddPod(c.ctx, migPod("stays", oneG, 1))
	if err != nil {
		t.Fatal(err)
	}
	kept := status.Containers[0].Devices(oneG)[0]

	storm, calm := context.WithCancel(c.ctx)
	var admissions sync.WaitGroup
	for _, resource := range []string{oneG, threeG} {
		admissions.Go(func() {
			for n := 0; storm.Err() == nil; n++ {
				pod := migPod(fmt.Sprintf("storm-%d-%s", n, resource[len(resource)-7:len(resource)-5]), resource, 1)
				// Pods may be rejected while a GPU is repartitioned.
				_, _ = c.kubelet.AddPod(storm, pod)
				_ = c.kubelet.DeletePod(pod.Namespace, pod.Name)
			}
		})
	}
	c.want("all-balanced")
	c.awaitAllocatable(threeG, 1)
	c.want("all-1g.10gb")
	c.awaitLayouts("all-1g.10gb at all", func(l nodereport.GPULayout) bool { return l.Wanted == "all-1g.10gb" })
	calm()
	admissions.Wait()
	c.awaitLayout("all-1g.10gb", nodereport.LayoutApplied)
	c.awaitAllocatable(oneG, 7)
	if _, err := c.kubelet.RestartContainer(c.ctx, "default", "stays", "main"); err != nil {
		t.Errorf("the pod that stays cannot restart: %v", err)
	}
	there := false
	gpus, err := nvml.Scan(c.sim)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range gpus[0].Partitions {
		there = there || p.UUID == kept
	}
	if !there {
		t.Errorf("the partition %s of a running pod is gone", kept)
	}
}

// TestFirstStart checks that the kubelet never sees a whole GPU that is to be partitioned, even if the kubelet
// has just started without a checkpoint. A waiting pod would take the GPU and block the layout.
func TestFirstStart(t *testing.T) {
	t.Parallel()
	c := newMIGRig(t, "h100", layoutNamed("all-balanced"))
	c.awaitAllocatable(threeG, 1)
	c.awaitLayout("all-balanced", nodereport.LayoutApplied)
	if whole, told := c.kubelet.Snapshot().Resources[gpuResource]; told {
		t.Errorf("the kubelet was told of the whole GPU: %+v", whole)
	}
}

// memoryStore keeps a journal that outlives programs.
type memoryStore struct {
	mu      sync.Mutex
	journal migchange.Journal
}

func (s *memoryStore) Read(_ string, value any) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*value.(*migchange.Journal) = s.journal
	return true, nil
}

func (s *memoryStore) WriteOrForget(_ string, value any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.journal = value.(migchange.Journal)
	return nil
}

// TestEndsInTheMiddle ends the program while a slow driver works on a step. It ends before the driver answers, at
// any step, and the standby finishes the change before it registers. The pod keeps its partition.
func TestEndsInTheMiddle(t *testing.T) {
	t.Parallel()
	for _, call := range []string{
		"ComputeInstanceDestroy", "GpuInstanceDestroy", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstance",
	} {
		t.Run(call, func(t *testing.T) {
			journal, claim := &memoryStore{}, make(chan struct{})
			c := newMIGRig(t, "h100+all-1g.10gb", layoutNamed("all-1g.10gb"), func(o *Options) {
				o.Journal = journal
				o.AcquireLock = func(ctx context.Context, standBy func()) error {
					standBy()
					select {
					case <-claim:
					case <-ctx.Done():
					}
					return ctx.Err()
				}
			})
			first, follow, end := c.serveUntil(t, journal)
			c.awaitAllocatable(oneG, 7)
			status, err := c.kubelet.AddPod(c.ctx, migPod("stays", oneG, 1))
			if err != nil {
				t.Fatal(err)
			}
			kept := status.Containers[0].Devices(oneG)[0]
			begun := c.sim.Calls(call)
			answer := make(chan struct{})
			letGo := sync.OnceFunc(func() { close(answer) })
			defer letGo()
			c.sim.InjectFault(call, simnode.Fault{Return: nvml.Success, Until: answer, Times: 1})
			follow.set(migProfile(layoutNamed("all-balanced")), nil)
			c.until(call, func() error {
				if c.sim.Calls(call) == begun {
					return fmt.Errorf("layouts %+v", first.mig.Status())
				}
				return nil
			})
			end()
			c.want("all-balanced")
			close(claim)
			letGo()
			c.awaitLayout("all-balanced", nodereport.LayoutApplied)
			c.awaitAllocatable(threeG, 1)
			c.awaitAllocatable(oneG, 2)
			var after migchange.Journal
			if _, err := journal.Read("journal", &after); err != nil || len(after.Underway) != 0 {
				t.Errorf("journal %+v (%v)", after, err)
			}
			gpus, err := nvml.Scan(c.sim)
			if err != nil {
				t.Fatal(err)
			}
			if _, there := find(gpus[0].Partitions, kept); !there {
				t.Errorf("the partition %s of a running pod is gone", kept)
			}
		})
	}
}

func find(partitions []sharing.Partition, uuid string) (sharing.Partition, bool) {
	for _, p := range partitions {
		if p.UUID == uuid {
			return p, true
		}
	}
	return sharing.Partition{}, false
}

// serveUntil runs another program on the rig's node, with its own policy. end stops it and waits.
func (c *migRig) serveUntil(t *testing.T, journal migchange.Store) (program *agent, follow fakePolicy, end func()) {
	t.Helper()
	library := nvml.WithDeadlines(c.sim, nvml.Limits{})
	options, n := c.options, nvml.NewNode(library, nvml.Options{Logger: c.options.Logger})
	options.AcquireLock, options.Journal = nil, journal
	options.Node, options.Partitioner, options.Refresh = n, nvml.NewPartitioner(library, n.PauseEvents), n.Refresh
	options.Plugin = plugin.NewManager(c.managing)
	follow = fakePolicy{newInput(c.policy.get())}
	options.ConfigSource = follow
	program = newAgent(withIdle(options))
	ctx, cancel := context.WithCancel(c.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := program.run(ctx); err != nil {
			t.Errorf("first program: %v", err)
		}
	}()
	end = func() {
		cancel()
		<-ended
	}
	t.Cleanup(end)
	return program, follow, end
}

// TestKubeletRestarts restarts the kubelet while devices are being withdrawn, between two layouts, and while a
// pod is waited for. The pod that stays keeps its partition, and the layout is complete in the end.
func TestKubeletRestarts(t *testing.T) {
	t.Parallel()
	for _, phase := range []struct {
		name    string
		reached func(nodereport.GPULayout) bool
		// hold makes the phase last until the function that it returns is called.
		hold func(*migRig) (end func())
	}{
		{
			"withdrawing", func(l nodereport.GPULayout) bool { return l.State == nodereport.LayoutPending },
			func(c *migRig) func() {
				c.seen.blind.Lock()
				return c.seen.blind.Unlock
			},
		},
		{
			"cutting", func(l nodereport.GPULayout) bool { return l.Reason == "partitions are being made" },
			func(c *migRig) func() {
				ended := make(chan struct{})
				c.sim.InjectFault("GpuInstanceCreateComputeInstance", simnode.Fault{Return: nvml.Success, Until: ended, Times: 1})
				return func() { close(ended) }
			},
		},
		{"waiting", func(l nodereport.GPULayout) bool { return l.State == nodereport.LayoutBlocked }, nil},
	} {
		t.Run(phase.name, func(t *testing.T) {
			c := newMIGRig(t, "h100+all-1g.10gb", layoutNamed("all-1g.10gb"))
			c.awaitAllocatable(oneG, 7)
			pods := map[string]string{}
			for _, pod := range []string{"first", "second", "third"} {
				status, err := c.kubelet.AddPod(c.ctx, migPod(pod, oneG, 1))
				if err != nil {
					t.Fatal(err)
				}
				pods[pod] = status.Containers[0].Devices(oneG)[0]
			}
			end := func() {}
			if phase.hold != nil {
				end = sync.OnceFunc(phase.hold(c))
				t.Cleanup(end)
			}
			c.want("all-balanced")
			c.awaitLayouts(phase.name, func(l nodereport.GPULayout) bool { return l.Wanted == "all-balanced" && phase.reached(l) })
			if err := c.kubelet.Restart(c.ctx); err != nil {
				t.Fatal(err)
			}
			if err := c.kubelet.RestorePods(c.ctx); err != nil {
				t.Fatal(err)
			}
			end()
			c.awaitLayout("all-balanced", nodereport.LayoutBlocked)
			c.awaitAllocatable(threeG, 1)
			gpus, err := nvml.Scan(c.sim)
			if err != nil {
				t.Fatal(err)
			}
			for pod, partition := range pods {
				if _, there := find(gpus[0].Partitions, partition); !there {
					t.Errorf("the partition of pod %s is gone", pod)
				}
			}
			for pod := range pods {
				if err := c.kubelet.DeletePod("default", pod); err != nil {
					t.Fatal(err)
				}
			}
			c.awaitLayout("all-balanced", nodereport.LayoutApplied)
			c.awaitAllocatable(oneG, 2)
		})
	}
}

func layoutNamed(name string) sharing.MIGConfig {
	return sharing.MIGConfig{Manage: true, Name: name, WhenBusy: sharing.WaitWhenBusy}
}
