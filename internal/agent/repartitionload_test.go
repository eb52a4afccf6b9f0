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

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// cutRig is the whole program but for its command line, between a simulated
// driver and a simulated kubelet. The kubelet ends the test with an error for
// each breach of the contract, such as a Healthy device that leaves a list.
type cutRig struct {
	*rig
	sim    *simnode.Node
	policy fakePolicy
	// managing is what its plugin manager was made of.
	managing plugin.Options
}

func newCutRig(t *testing.T, node string, wish sharing.Repartition, adjust ...func(*Options)) *cutRig {
	t.Helper()
	sim, err := simnode.New(node)
	if err != nil {
		t.Fatal(err)
	}
	socket, err := os.MkdirTemp("", "vp") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(socket) })
	c := &cutRig{sim: sim, policy: fakePolicy{newInput(cutProfile(wish), nil)}}
	c.rig = newRig(t, func(r *rig) {
		dir, err := os.MkdirTemp("", "va") //nolint:usetesting // a socket's path must be short
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		log := slog.New(slog.DiscardHandler)
		if testing.Verbose() {
			log = slog.New(slog.NewTextHandler(os.Stderr, nil))
		}
		r.kubelet = simkubelet.New(simkubelet.Options{
			Dir: dir, PodResourcesSocket: filepath.Join(socket, "pr.sock"),
			Violation: func(message string) { t.Errorf("kubelet's contract broken: %s", message) },
		})
		sight := podresources.New(podresources.Options{Socket: filepath.Join(socket, "pr.sock"), CheckpointDir: dir, Logger: log})
		t.Cleanup(func() { _ = sight.Close() })
		n := nvml.NewNode(sim, nvml.Options{Logger: log})
		r.options.Node, r.options.Policy, r.options.Logger, r.options.Holders = n, c.policy, log, sight
		c.managing = plugin.Options{
			Dir: dir, Kubelet: sight, Logger: log,
			Timing: plugin.Timing{Quiet: 100 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 50 * time.Millisecond},
		}
		r.options.Plugin = plugin.NewManager(c.managing)
		r.options.Partitioner = nvml.NewPartitioner(sim, n.Quiet)
		r.options.Journal = &diskless{}
		r.options.Refresh = n.LookAgain
		for _, a := range adjust {
			a(&r.options)
		}
	})
	return c
}

// diskless is a journal that no crash is played with.
type diskless struct{}

func (*diskless) Load() (sharing.CutJournal, error) { return sharing.CutJournal{}, nil }
func (*diskless) Save(sharing.CutJournal) error     { return nil }

func cutProfile(wish sharing.Repartition) sharing.Profile {
	return sharing.Profile{
		MIGStrategy: sharing.MIGMixed, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames: []sharing.Naming{{Pattern: "*", Name: gpuResource}}, MIG: wish,
	}
}

func (c *cutRig) wish(layout string) { c.policy.set(cutProfile(layoutNamed(layout)), nil) }

// awaitLayout waits until the board has come so far with the layout.
func (c *cutRig) awaitLayout(name string, state sharing.LayoutState) {
	c.t.Helper()
	c.awaitLayouts(name+" "+string(state), func(l sharing.BoardLayout) bool { return l.Wanted == name && l.State == state })
}

func (c *cutRig) awaitLayouts(what string, so func(sharing.BoardLayout) bool) {
	c.t.Helper()
	for {
		layouts := c.agent.layouts()
		if len(layouts) > 0 && so(layouts[0]) {
			return
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-c.ctx.Done():
			c.t.Fatalf("layouts %+v, want %s", layouts, what)
		}
	}
}

func (c *cutRig) awaitAllocatable(resource string, count int) {
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

// TestRecutUnderLoad holds that pods on kept partitions keep them while the rest
// of the board is re-cut to and fro, with admissions going on all the time, and
// that the layout is complete when nothing is in the way any more.
func TestRecutUnderLoad(t *testing.T) {
	c := newCutRig(t, "h100", layoutNamed("all-1g.10gb"))
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
				// Being turned away is what happens to pods when a board is cut.
				_, _ = c.kubelet.AddPod(storm, pod)
				_ = c.kubelet.DeletePod(pod.Namespace, pod.Name)
			}
		})
	}
	c.wish("all-balanced")
	c.awaitAllocatable(threeG, 1)
	c.wish("all-1g.10gb")
	c.awaitLayouts("all-1g.10gb at all", func(l sharing.BoardLayout) bool { return l.Wanted == "all-1g.10gb" })
	calm()
	admissions.Wait()
	c.awaitLayout("all-1g.10gb", sharing.LayoutApplied)
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

// TestFirstStart holds that the kubelet is never told of a whole board that is to
// be cut, also when it has just begun and has no checkpoint yet: a pod that waits
// for a GPU would take it, and keep the layout waiting.
func TestFirstStart(t *testing.T) {
	c := newCutRig(t, "h100", layoutNamed("all-balanced"))
	c.awaitAllocatable(threeG, 1)
	c.awaitLayout("all-balanced", sharing.LayoutApplied)
	if whole, told := c.kubelet.Snapshot().Resources[gpuResource]; told {
		t.Errorf("the kubelet was told of the whole board: %+v", whole)
	}
}
