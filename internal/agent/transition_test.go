package agent

import (
	"context"
	"flag"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

var driverTime = flag.Duration("driver-time", 10*time.Millisecond, "how long the simulated driver takes for each change of a GPU's MIG mode or instances")

// migCalls are the driver's calls that change a GPU's MIG mode or instances.
var migCalls = []string{
	"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceDestroy",
	"GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy",
}

// migCount counts these calls.
func (c *migRig) migCount() (count int) {
	for _, call := range migCalls {
		count += c.sim.Calls(call)
	}
	return count
}

// TestMIGChangeOfANode changes the layouts of eight free GPUs with production timing, except that no device
// leaves a list. The driver makes one change at a time. A resource that keeps its name always has allocatable
// devices, and removed ones stay listed. It logs how long each change takes; that it waits for nothing else is
// tested in simulated time (TestWaitsForNothingButTheDriver).
func TestMIGChangeOfANode(t *testing.T) {
	t.Parallel()
	c := newTimedMIGRig(t, "dgx-h100", migProfile(sharing.MIGConfig{}), plugin.Timing{RemovalDelay: time.Hour})
	for _, call := range migCalls {
		c.sim.InjectFault(call, simnode.Fault{Return: nvml.Success, Delay: *driverTime})
	}
	c.awaitAllocatable(gpuResource, 8)
	const slice = "nvidia.com/slice" // any partition
	listed := map[string]int{gpuResource: 8}
	for _, to := range []struct {
		layout, name, resource string
		count                  int
		stays                  bool
	}{
		{"all-3g.40gb", slice, slice, 16, false},
		{"all-2g.20gb", slice, slice, 24, true},
		{"all-balanced", slice, slice, 32, true},
		{"all-7g.80gb", "", "nvidia.com/mig-7g.80gb", 8, false},
		{"all-disabled", "", gpuResource, 8, false},
	} {
		profile := migProfile(layoutNamed(to.layout))
		if to.name != "" {
			profile.MIGNames = []sharing.NamingRule{{Pattern: "*", Name: to.name}}
		}
		before, least, first := c.migCount(), 1000, time.Duration(0)
		began := time.Now()
		c.policy.set(profile, nil)
		if err := c.kubelet.Await(c.ctx, func(k simkubelet.Snapshot) bool {
			now := k.Resources[to.resource].Allocatable
			least = min(least, now)
			if now > 0 && first == 0 {
				first = time.Since(began) //nolint:forbidigo // It is logged, and nothing is judged by it.
			}
			return now == to.count && c.agent.mig.Status()[0].Wanted == to.layout
		}); err != nil {
			t.Fatal(err)
		}
		took := time.Since(began) //nolint:forbidigo // It is logged, and nothing is judged by it.
		driver := time.Duration(c.migCount()-before) * *driverTime
		t.Logf("%s: %s, of which %s for the driver; the first after %s", to.layout,
			took.Round(time.Millisecond), driver, first.Round(time.Millisecond))
		switch to.layout {
		case "all-balanced":
			listed[slice] += to.count - 8 // One 2g.20gb of each GPU stays.
		case "all-disabled": // The GPUs are still listed.
		default:
			listed[to.resource] += to.count
		}
		for name, count := range listed {
			if now := c.kubelet.Snapshot().Resources[name].Capacity; now != count {
				t.Errorf("%s: the kubelet knows %d devices of %s, want %d", to.layout, now, name, count)
			}
		}
		if to.stays && least == 0 {
			t.Errorf("%s: nothing was allocatable", to.layout)
		}
	}
}

// TestTransitionsThatWaitForAPod checks that a held GPU is repartitioned, or withdrawn if it was excluded, once
// its pod has ended, without the removal delay. It logs how long that takes, and how long a free one takes.
func TestTransitionsThatWaitForAPod(t *testing.T) {
	t.Parallel()
	c := newTimedMIGRig(t, "h100x4", migProfile(sharing.MIGConfig{}), plugin.Timing{RemovalDelay: time.Hour})
	c.awaitAllocatable(gpuResource, 4)
	held := c.holder("holder", gpuResource)
	excluding := func(unit string) sharing.Profile {
		profile := migProfile(sharing.MIGConfig{})
		selector, err := sharing.ParseSelector(unit)
		if err != nil {
			t.Fatal(err)
		}
		profile.Exclude = []sharing.Selector{selector}
		return profile
	}
	free := ""
	for _, gpu := range c.sim.GPUs() {
		if gpu.UUID != held {
			free = gpu.UUID
		}
	}
	c.measure("excluded, free: Unhealthy", func() { c.policy.set(excluding(free), nil) }, func() { c.awaitAllocatable(gpuResource, 3) })
	c.measure("excluded, free: nobody's after that", func() {}, func() { c.awaitWithdrawn(free) })
	c.measure("included again", func() { c.policy.set(migProfile(sharing.MIGConfig{}), nil) }, func() { c.awaitAllocatable(gpuResource, 4) })
	c.measure("excluded, held: Unhealthy", func() { c.policy.set(excluding(held), nil) }, func() { c.awaitAllocatable(gpuResource, 3) })
	c.measure("excluded, held: nobody's after its pod's end", func() { c.end("holder") }, func() { c.awaitWithdrawn(held) })

	c.policy.set(migProfile(sharing.MIGConfig{}), nil)
	c.awaitAllocatable(gpuResource, 4)
	held = c.holder("holder", gpuResource)
	c.want("all-3g.40gb")
	c.measure("MIG, free: three GPUs", func() {}, func() { c.awaitAllocatable(threeG, 6) })
	c.measure("MIG, held: after its pod's end", func() { c.end("holder") }, func() { c.awaitAllocatable(threeG, 8) })
}

// holder adds a pod, waits until the program has seen it, and returns its device.
func (c *migRig) holder(name, resource string) string {
	c.t.Helper()
	status, err := c.kubelet.AddPod(c.ctx, migPod(name, resource, 1))
	if err != nil {
		c.t.Fatal(err)
	}
	unit := status.Containers[0].Devices(resource)[0]
	for {
		select {
		case held := <-c.seen.held:
			for _, a := range held {
				if a.Pod == name && a.Devices[0] == unit {
					return unit
				}
			}
		case <-c.ctx.Done():
			c.t.Fatal("the holder is never seen")
		}
	}
}

// seeing is the plugin manager's view of the kubelet. held has the last reading; while a test has locked
// blind, there is no other.
type seeing struct {
	plugin.Kubelet
	held  chan []sharing.Allocation
	blind sync.RWMutex
}

func (s *seeing) Held(ctx context.Context) ([]sharing.Allocation, error) {
	s.blind.RLock()
	defer s.blind.RUnlock()
	held, err := s.Kubelet.Held(ctx)
	select {
	case <-s.held:
	default:
	}
	select {
	case s.held <- held:
	default:
	}
	return held, err
}

func (c *migRig) end(pod string) {
	c.t.Helper()
	if err := c.kubelet.DeletePod("default", pod); err != nil {
		c.t.Fatal(err)
	}
}

func (c *migRig) awaitWithdrawn(unit string) {
	c.t.Helper()
	c.await("withdrawn: "+unit, func() bool { return c.options.Plugin.Withdrawn(unit) })
}

func (c *migRig) measure(what string, begin, await func()) {
	began := time.Now()
	begin()
	await()
	took := time.Since(began) //nolint:forbidigo // It is logged, and nothing is judged by it.
	c.t.Logf("%s: %s", what, took.Round(time.Millisecond))
}
