package nvml_test

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestScanErrors checks which GPUs are still found when something fails.
func TestScanErrors(t *testing.T) {
	tests := []struct {
		name   string
		script func(*simnode.Node) error
		// want are the indices of the GPUs found.
		want []int
		err  nvml.Return
		says string
	}{
		{
			"no driver",
			func(n *simnode.Node) error {
				n.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded})
				return nil
			},
			nil, nvml.DriverNotLoaded, "open the driver",
		},
		{
			"no list",
			func(n *simnode.Node) error {
				n.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown})
				return nil
			},
			nil, nvml.Unknown, "list the GPUs",
		},
		{
			"a dead GPU",
			func(n *simnode.Node) error { return n.Lose(2) },
			[]int{0, 1, 3}, nvml.GPUIsLost, "read GPU 2: nvml: DeviceGetHandleByIndex(2)",
		},
		{
			"a GPU without UUID",
			func(n *simnode.Node) error {
				_, err := n.InjectGPUFault(0, "DeviceGetUUID", simnode.Fault{Return: nvml.Unknown})
				return err
			},
			[]int{1, 2, 3}, nvml.Unknown, "read GPU 0: nvml: DeviceGetUUID",
		},
		{
			"facts that nobody needs",
			func(n *simnode.Node) error {
				for _, call := range []string{
					"DeviceGetMinorNumber", "DeviceGetNumaNodeId", "DeviceGetArchitecture", "DeviceGetBrand",
					"DeviceGetCudaComputeCapability", "DeviceGetTemperature",
				} {
					n.InjectFault(call, simnode.Fault{Return: nvml.NoPermission})
				}
				return nil
			},
			[]int{0, 1, 2, 3}, nvml.Success, "",
		},
		{
			"a driver that cannot be closed",
			func(n *simnode.Node) error {
				n.InjectFault("Shutdown", simnode.Fault{Return: nvml.Unknown})
				return nil
			},
			[]int{0, 1, 2, 3}, nvml.Unknown, "close the driver",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			must(t, test.script(sim))
			gpus, err := nvml.Scan(sim)
			var got []int
			for _, gpu := range gpus {
				got = append(got, gpu.Index)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("GPUs %v, want %v", got, test.want)
			}
			switch {
			case test.err == nvml.Success:
				if err != nil {
					t.Error(err)
				}
			case !errors.Is(err, test.err) || !strings.Contains(err.Error(), test.says):
				t.Errorf("error %v, want %s and %q", err, test.err, test.says)
			}
		})
	}
}

var update = flag.Bool("update", false, "write the golden files anew")

// TestScanGolden checks the inventory of each simulated node, down to the UUIDs, as other packages' golden files
// depend on these nodes.
func TestScanGolden(t *testing.T) {
	names := append(simnode.Names(),
		"a30x4+all-balanced",
		"dgx-a100+all-1g.5gb",
		"dgx-a100+all-balanced",
		"dgx-a100+all-enabled",
		"h200+all-1g.35gb",
		"mixed+all-1c.2g.10gb",
		"rtx-pro-6000+all-1g.24gb-me",
	)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			node := simulate(t, name)
			gpus, err := nvml.Scan(node)
			if err != nil {
				t.Fatal(err)
			}
			got, err := json.MarshalIndent(gpus, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, '\n')
			path := filepath.Join("testdata", name+".json")
			if *update {
				if err := os.WriteFile(path, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("inventory (-want +got):\n%s", diff)
			}
			if node.Calls("Init") != node.Calls("Shutdown") {
				t.Errorf("%d times Init, %d times Shutdown", node.Calls("Init"), node.Calls("Shutdown"))
			}
		})
	}
}

func simulate(t *testing.T, name string) *simnode.Node {
	t.Helper()
	node, err := simnode.New(name)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

// faults are by UUID, of the GPUs that have one.
func (w *watched) faults() map[string]string {
	gpus, err := w.Inventory()
	must(w.t, err)
	found := map[string]string{}
	for _, gpu := range gpus {
		if !gpu.Health.Healthy() {
			found[gpu.UUID] = gpu.Health.Reason
		}
	}
	return found
}

// TestUncountedIsNotLost has a probe find a returned GPU in place of one that could not be read. The GPUs were
// not counted, so the other one is not lost, and its error is not over.
func TestUncountedIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		before, _ := w.Inventory()
		must(t, sim.XID(1, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		end, err := sim.InjectGPUFault(1, "DeviceGetName", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		must(t, sim.Remove(0))
		after(5 * time.Second)
		end()
		_, err = sim.Add("")
		must(t, err)
		after(2 * time.Minute)
		if diff := cmp.Diff(map[string]string{before[1].UUID: "XID 79"}, w.faults()); diff != "" {
			t.Errorf("faults (-want +got):\n%s", diff)
		}
	})
}

// TestLateLookOfOldEnumeration checks that a look that began before the GPUs were renumbered does not change
// their indexes.
func TestLateLookOfOldEnumeration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		before, _ := w.Inventory()
		_, err := sim.InjectGPUFault(3, "DeviceGetMemoryInfo", simnode.Fault{Delay: 6 * time.Second, Times: 1})
		must(t, err)
		after(13 * time.Second)
		must(t, sim.Remove(0))
		after(4 * time.Second)
		gpus, err := w.Inventory()
		must(t, err)
		for _, gpu := range gpus {
			if gpu.UUID == before[3].UUID && gpu.DriverIndex != "2" {
				t.Errorf("the driver has GPU 3 at %q, want 2", gpu.DriverIndex)
			}
		}
	})
}

// TestEnumerateAsksOnce checks that GPUs with unchanged handles cost no more calls.
func TestEnumerateAsksOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		_, err := sim.Add("t4")
		must(t, err)
		after(25 * time.Second)
		asked := sim.Calls("DeviceGetMemoryInfo")
		after(10 * time.Second)
		if got := sim.Calls("DeviceGetMemoryInfo") - asked; got != 5 {
			t.Errorf("%d memory queries, want one of each GPU", got)
		}
		w.expect("with another GPU", nil)
	})
}

// TestStuckGPUIsAskedOnce checks that a GPU is not read while a reading of it is in progress.
func TestStuckGPUIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		w := watch(t, sim)
		asked := sim.Calls("DeviceGetMemoryInfo")
		sim.InjectFault("DeviceGetMemoryInfo", simnode.Fault{Delay: time.Hour})
		after(10 * time.Minute)
		if got := sim.Calls("DeviceGetMemoryInfo") - asked; got != 1 {
			t.Errorf("%d memory queries while one is stuck, want that one", got)
		}
		_ = w.stop()
		after(2 * time.Hour)
	})
}

// TestReplacedGPUSeenByProbe checks that the driver is not reopened if GPUs change places, even if a probe sees
// it first.
func TestReplacedGPUSeenByProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		sim.InjectFault("DeviceGetSupportedEventTypes", simnode.Fault{Return: nvml.NotSupported})
		w := watch(t, sim)
		before, _ := w.Inventory()
		exchange(t, sim)
		after(15 * time.Second)
		if diff := cmp.Diff(map[string]string{before[0].UUID: "lost"}, w.faults()); diff != "" {
			t.Errorf("faults (-want +got):\n%s", diff)
		}
		if gpus, _ := w.Inventory(); len(gpus) != 5 {
			t.Errorf("%d GPUs, want 5 with the one that is gone", len(gpus))
		}
		if got := sim.Calls("Init"); got != 1 {
			t.Errorf("the driver was opened %d times, want once", got)
		}
	})
}

// reordered is a driver that can swap its first two GPUs.
type reordered struct {
	*simnode.Node
	now atomic.Bool
}

func (d *reordered) DeviceGetHandleByIndex(index int) (nvml.Device, error) {
	if d.now.Load() && index < 2 {
		index = 1 - index
	}
	return d.Node.DeviceGetHandleByIndex(index)
}

// TestResetAndReordered checks that if two GPUs swap places and are reset, both resets are seen, even if one GPU
// is seen before the other.
func TestResetAndReordered(t *testing.T) {
	for _, delay := range []time.Duration{0, 3 * time.Second} {
		t.Run(delay.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				driver := &reordered{Node: simulate(t, "a30x4")}
				w := watch(t, driver)
				for gpu := range 3 {
					must(t, driver.XID(gpu, 79, nvml.WholeGPU, nvml.WholeGPU))
				}
				synctest.Wait()
				for gpu := range 2 {
					must(t, driver.Heal(gpu))
				}
				driver.now.Store(true)
				_, err := driver.InjectGPUFault(1, "DeviceGetMemoryInfo", simnode.Fault{Delay: delay, Times: 1})
				must(t, err)
				after(time.Minute)
				w.expect("a minute later", map[string]string{"2": "XID 79"})
			})
		})
	}
}
