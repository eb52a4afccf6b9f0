package nvmltest_test

import (
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/test/nvmltest"
)

// TestSimulated holds the suite against simulated nodes, as they are and as the
// program uses them, with deadlines.
func TestSimulated(t *testing.T) {
	for name, want := range map[string]nvmltest.Expect{
		"a30x4+all-balanced":    {GPUs: 4, Partitions: 12},
		"dgx-a100+all-balanced": {GPUs: 8, Partitions: 32},
		"dgx-b200":              {GPUs: 8},
		"empty":                 {},
		"l40sx8":                {GPUs: 8},
		"mixed":                 {GPUs: 6, Partitions: 11},
		"t4":                    {GPUs: 1},
	} {
		for _, world := range []string{"", "unprivileged", "monitor-only", "passthrough", "client=dcgm", "own-pids", "moving-minors", "late-profiles", "old-driver", "persistence", "unprivileged,passthrough,client=dcgm,own-pids,moving-minors,late-profiles"} {
			t.Run(name+" "+world, func(t *testing.T) {
				run(t, name, want, func(n *simnode.Node) nvml.Library {
					if err := n.SetWorld(world); err != nil {
						t.Fatal(err)
					}
					return n
				})
			})
		}
		t.Run(name+" with deadlines", func(t *testing.T) {
			run(t, name, want, func(n *simnode.Node) nvml.Library { return nvml.WithDeadlines(n, nvml.Limits{}) })
		})
	}
}

func run(t *testing.T, name string, want nvmltest.Expect, through func(*simnode.Node) nvml.Library) {
	var node *simnode.Node
	want.Event = func(t *testing.T, gpu int) {
		if err := node.XID(gpu, 94, nvml.WholeGPU, nvml.WholeGPU); err != nil {
			t.Fatal(err)
		}
	}
	nvmltest.Run(t, func(t *testing.T) nvml.Library {
		var err error
		if node, err = simnode.New(name); err != nil {
			t.Fatal(err)
		}
		return through(node)
	}, want)
}

// TestRefused checks that the suite accepts what nvml.h allows: calls that are refused
// without privilege, a GPU that may not be opened, and waits that end early.
func TestRefused(t *testing.T) {
	for _, call := range []string{
		"DeviceGetGpuInstanceById", "GpuInstanceGetInfo", "GpuInstanceGetComputeInstanceById", "ComputeInstanceGetInfo",
	} {
		t.Run(call, func(t *testing.T) {
			node, err := simnode.New("dgx-a100+all-balanced")
			if err != nil {
				t.Fatal(err)
			}
			for _, refused := range []string{
				call, "DeviceGetMemoryInfo", "DeviceGetComputeRunningProcesses",
				"DeviceGetGpuInstances", "DeviceGetGpuInstancePossiblePlacements", "GpuInstanceGetComputeInstanceProfileInfo",
			} {
				node.InjectFault(refused, simnode.Fault{Return: nvml.NoPermission})
			}
			if _, err := node.InjectGPUFault(3, "DeviceGetHandleByIndex", simnode.Fault{Return: nvml.NoPermission}); err != nil {
				t.Fatal(err)
			}
			node.InjectFault("EventSetWait", simnode.Fault{Return: nvml.Timeout, Times: 3})
			nvmltest.RunOnce(t, node, nvmltest.Expect{GPUs: 8, Partitions: 28})
		})
	}
}
