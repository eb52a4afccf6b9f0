package agent

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// shelf is a journal that outlives programs.
type shelf struct {
	mu   sync.Mutex
	kept sharing.CutJournal
}

func (s *shelf) Load() (sharing.CutJournal, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kept, nil
}

func (s *shelf) Save(journal sharing.CutJournal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = journal
	return nil
}

// TestEndsInTheMiddle holds that a program which is told to end while a step is
// with a slow driver ends in time, whichever step that is, and that the one that
// stood by finishes the change before it registers. The pod keeps its partition.
func TestEndsInTheMiddle(t *testing.T) {
	for _, call := range []string{
		"ComputeInstanceDestroy", "GpuInstanceDestroy", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstance",
	} {
		t.Run(call, func(t *testing.T) {
			journal, claim := &shelf{}, make(chan struct{})
			c := newCutRig(t, "h100+all-1g.10gb", layoutNamed("all-1g.10gb"), func(o *Options) {
				o.Journal = journal
				o.Claim = func(ctx context.Context, standBy func()) error {
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
			c.sim.Script(call, simnode.Fault{Return: nvml.Success, Delay: 3 * time.Second, Times: 1})
			follow.set(cutProfile(layoutNamed("all-balanced")), nil)
			for c.sim.Calls(call) == begun {
				select {
				case <-time.After(time.Millisecond):
				case <-c.ctx.Done():
					t.Fatalf("no %s; layouts %+v", call, first.layouts())
				}
			}
			// 500 ms are for the driver, the rest for a busy machine.
			told := time.Now()
			end()
			if took := time.Since(told); took > 2*time.Second {
				t.Errorf("ended after %s", took)
			}
			c.wish("all-balanced")
			close(claim)
			c.awaitLayout("all-balanced", sharing.LayoutApplied)
			c.awaitAllocatable(threeG, 1)
			c.awaitAllocatable(oneG, 2)
			if after, err := journal.Load(); err != nil || len(after.Underway) != 0 {
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

// serveUntil runs another program on the rig's node, with a policy of its own.
// end ends it and returns when it has.
func (c *cutRig) serveUntil(t *testing.T, journal Journal) (program *agent, follow fakePolicy, end func()) {
	t.Helper()
	options, n := c.options, nvml.NewNode(c.sim, nvml.Options{Logger: c.options.Logger})
	options.Claim, options.Journal = nil, journal
	options.Node, options.Partitioner, options.Refresh = n, nvml.NewPartitioner(c.sim, n.Quiet), n.LookAgain
	options.Plugin = plugin.NewManager(c.managing)
	follow = fakePolicy{newInput(c.policy.get())}
	options.Policy = follow
	program = newAgent(options)
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

// TestKubeletRestarts restarts the kubelet while devices are being withdrawn,
// while the board is between two layouts, and while a pod is waited for. The pod
// that stays keeps its partition, and the layout is complete in the end.
func TestKubeletRestarts(t *testing.T) {
	phases := map[string]func(sharing.BoardLayout) bool{
		"withdrawing": func(l sharing.BoardLayout) bool { return l.State == sharing.LayoutPending },
		"cutting":     func(l sharing.BoardLayout) bool { return l.Reason == "partitions are being made" },
		"waiting":     func(l sharing.BoardLayout) bool { return l.State == sharing.LayoutBlocked },
	}
	for name, reached := range phases {
		t.Run(name, func(t *testing.T) {
			c := newCutRig(t, "h100+all-1g.10gb", layoutNamed("all-1g.10gb"))
			c.awaitAllocatable(oneG, 7)
			pods := map[string]string{}
			for _, pod := range []string{"first", "second", "third"} {
				status, err := c.kubelet.AddPod(c.ctx, migPod(pod, oneG, 1))
				if err != nil {
					t.Fatal(err)
				}
				pods[pod] = status.Containers[0].Devices(oneG)[0]
			}
			// Slow enough to be met.
			c.sim.Script("GpuInstanceCreateComputeInstance", simnode.Fault{Return: nvml.Success, Delay: 300 * time.Millisecond, Times: 1})
			c.wish("all-balanced")
			c.awaitLayouts(name, func(l sharing.BoardLayout) bool { return l.Wanted == "all-balanced" && reached(l) })
			if err := c.kubelet.Restart(c.ctx); err != nil {
				t.Fatal(err)
			}
			if err := c.kubelet.RestorePods(c.ctx); err != nil {
				t.Fatal(err)
			}
			c.awaitLayout("all-balanced", sharing.LayoutBlocked)
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
			c.awaitLayout("all-balanced", sharing.LayoutApplied)
			c.awaitAllocatable(oneG, 2)
		})
	}
}
