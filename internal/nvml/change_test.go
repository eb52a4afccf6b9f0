package nvml_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/nvmltest"
)

func uuids(gpus []sharing.GPU) []string {
	var list []string
	for _, gpu := range gpus {
		list = append(list, gpu.UUID)
	}
	return list
}

// TestWatchHotPlug checks that a removed GPU stays known, that the ones behind it keep identity and faults
// although their indexes change, and that it is healthy when it is back.
func TestWatchHotPlug(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		before, _ := w.Inventory()
		must(t, sim.XID(1, 48, nvml.WholeGPU, nvml.WholeGPU))
		must(t, sim.XID(3, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		must(t, sim.Remove(1))
		after(rescan)
		gpus, err := w.Inventory()
		must(t, err)
		faults := map[string]string{}
		for _, gpu := range gpus {
			faults[gpu.UUID] = gpu.Health.Reason
		}
		want := map[string]string{
			before[0].UUID: "", before[1].UUID: "XID 48, lost", before[2].UUID: "", before[3].UUID: "XID 79",
		}
		if diff := cmp.Diff(want, faults); diff != "" {
			t.Fatalf("after one was pulled (-want +got):\n%s", diff)
		}
		_, err = sim.Add("")
		must(t, err)
		after(rescan)
		w.expect("when it is back", map[string]string{"3": "XID 79"})
		gpus, _ = w.Inventory()
		if diff := cmp.Diff(uuids(before), uuids(gpus)); diff != "" {
			t.Errorf("GPUs (-before +after):\n%s", diff)
		}
	})
}

// TestWatchReplacedGPU checks that replacing a GPU between two passes is seen, although the number of GPUs stays.
func TestWatchReplacedGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watch(t, sim)
		before, _ := w.Inventory()
		must(t, sim.Remove(0))
		_, err := sim.Add("t4")
		must(t, err)
		// The wait for events of the removed GPU may end before the other GPU is there. Then all GPUs are read at once,
		// and the next pass is later.
		after(rescan + probe)
		gpus, _ := w.Inventory()
		if len(gpus) != 5 {
			t.Fatalf("%d GPUs, want 5: the one that is gone and the new one", len(gpus))
		}
		if got := sim.Calls("Init"); got != 1 {
			t.Errorf("the driver was opened %d times, want once", got)
		}
		for _, gpu := range gpus {
			if lost := gpu.UUID == before[0].UUID; (gpu.Health.Reason == "lost") != lost || !lost && !gpu.Health.Healthy() {
				t.Errorf("%s has fault %q", gpu.UUID, gpu.Health.Reason)
			}
		}
	})
}

// TestWatchComesLater checks that a GPU that cannot be read at first is found later.
func TestWatchComesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		must(t, sim.Lose(2))
		w := watch(t, sim)
		if gpus, err := w.Inventory(); len(gpus) != 3 || err != nil {
			t.Fatalf("Inventory() = %d GPUs, %v, want 3", len(gpus), err)
		}
		must(t, sim.Heal(2))
		after(rescan)
		if gpus, err := w.Inventory(); len(gpus) != 4 || err != nil {
			t.Fatalf("Inventory() = %d GPUs, %v, want 4", len(gpus), err)
		}
		must(t, sim.XID(2, 79, nvml.WholeGPU, nvml.WholeGPU))
		synctest.Wait()
		w.expect("after an XID", map[string]string{"2": "XID 79"})
	})
}

// TestWatchMIGChange checks that a partition's fault goes with it: its replacement has the same instance IDs, but
// is another partition.
func TestWatchMIGChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "h200+all-1g.35gb")
		w := watch(t, sim)
		before, _ := w.Inventory()
		old := before[0].Partitions[1]
		must(t, sim.XID(0, 94, uint32(old.GI), uint32(old.CI)))
		synctest.Wait()
		w.expect("after an XID", map[string]string{"0:1": "XID 94"})
		must(t, nvmltest.DestroyComputeInstance(sim, 0, old.GI, old.CI))
		must(t, nvmltest.DestroyGPUInstance(sim, 0, old.GI))
		after(rescan)
		gpus, _ := w.Inventory()
		if n := len(gpus[0].Partitions); n != 3 {
			t.Fatalf("%d partitions, want 3 with a hole", n)
		}
		gi, err := nvmltest.CreateGPUInstance(sim, 0, 15, old.Placement.Start)
		must(t, err)
		ci, uuid, err := nvmltest.CreateComputeInstance(sim, 0, gi, 1)
		must(t, err)
		if gi != old.GI || ci != old.CI || uuid == old.UUID {
			t.Fatalf("new partition %d/%d %s, old one %d/%d %s", gi, ci, uuid, old.GI, old.CI, old.UUID)
		}
		after(rescan)
		w.expect("after a new one was created", nil)
		gpus, _ = w.Inventory()
		want := old
		want.UUID = uuid
		if diff := cmp.Diff(want, gpus[0].Partitions[1]); diff != "" {
			t.Errorf("new partition (-want +got):\n%s", diff)
		}
	})
}

// TestWatchMinorNumbers checks that a GPU has its current device node, not the one from before a change of MIG
// mode, which is another GPU's.
func TestWatchMinorNumbers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a100-40x2")
		must(t, sim.SetWorld("moving-minors"))
		w := watch(t, sim)
		expect := func(want ...int) {
			t.Helper()
			gpus, err := w.Inventory()
			must(t, err)
			for i, gpu := range gpus {
				if gpu.Minor != want[i] {
					t.Errorf("GPU %d has the minor number %d, want %d", i, gpu.Minor, want[i])
				}
			}
		}
		expect(1, 0)
		must(t, nvmltest.SetMIG(sim, 0, true))
		must(t, nvmltest.SetMIG(sim, 1, true))
		must(t, w.Refresh(t.Context()))
		expect(2, 1)
		end := sim.InjectFault("DeviceGetMinorNumber", simnode.Fault{Return: nvml.Unknown})
		must(t, w.Refresh(t.Context()))
		expect(-1, -1)
		end()
		must(t, w.Refresh(t.Context()))
		expect(2, 1)
	})
}

// TestWatchEventOfNewPartition checks that an event for a partition that was created
// since the last pass finds it.
func TestWatchEventOfNewPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "dgx-a100+all-enabled")
		w := watch(t, sim)
		gi, err := nvmltest.CreateGPUInstance(sim, 4, 19, 0)
		must(t, err)
		ci, _, err := nvmltest.CreateComputeInstance(sim, 4, gi, 1)
		must(t, err)
		must(t, sim.XID(4, 94, uint32(gi), uint32(ci)))
		synctest.Wait()
		w.expect("after the XID", map[string]string{"4:0": "XID 94"})
		// One for a partition that there is not is forgotten with the next pass.
		must(t, sim.XID(4, 94, uint32(gi+1), 0))
		after(rescan)
		gi, err = nvmltest.CreateGPUInstance(sim, 4, 19, 1)
		must(t, err)
		_, _, err = nvmltest.CreateComputeInstance(sim, 4, gi, 1)
		must(t, err)
		after(rescan)
		w.expect("with a second partition", map[string]string{"4:0": "XID 94"})
	})
}

// TestWatchHiccupOfPartition checks that a partition does not count as destroyed after one failed call.
func TestWatchHiccupOfPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4+all-balanced")
		w := watch(t, sim)
		_, err := sim.InjectGPUFault(0, "DeviceGetGpuInstanceId", simnode.Fault{Return: nvml.Unknown, Skip: 1, Times: 1})
		must(t, err)
		must(t, sim.XID(0, 94, 2, 0))
		after(rescan)
		w.expect("when the call failed", map[string]string{"0:1": "XID 94, cannot be read"})
		after(rescan)
		w.expect("when it did not", map[string]string{"0:1": "recovering from XID 94, cannot be read"})
	})
}

// swapped is a driver that can swap the GPUs of two handles.
type swapped struct {
	*simnode.Node
	now atomic.Bool
}

func (d *swapped) DeviceGetUUID(device nvml.Device) (string, error) {
	first, _ := d.DeviceGetHandleByIndex(0)
	second, _ := d.DeviceGetHandleByIndex(1)
	switch {
	case d.now.Load() && device == first:
		device = second
	case d.now.Load() && device == second:
		device = first
	}
	return d.Node.DeviceGetUUID(device)
}

// TestWatchHandleNamesAnother checks that a handle is not trusted forever to mean the same GPU.
func TestWatchHandleNamesAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		driver := &swapped{Node: simulate(t, "mixed")}
		w := watch(t, driver)
		before, _ := w.Inventory()
		driver.now.Store(true)
		after(rescan)
		gpus, _ := w.Inventory()
		for i := range 2 {
			if gpus[i].UUID != before[i].UUID || gpus[i].DriverIndex != fmt.Sprint(1-i) {
				t.Errorf("GPU %d, which was %s, is %+v", i, before[i].UUID, gpus[i])
			}
		}
	})
}

// nameless is a driver that does not name GPU instance profiles.
type nameless struct{ *simnode.Node }

func (d nameless) DeviceGetGpuInstanceProfileInfo(device nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	profile, err := d.Node.DeviceGetGpuInstanceProfileInfo(device, enum)
	profile.Name = ""
	return profile, err
}

// untitled is a driver that does not write the profile into product names, but
// does so before the names of GPU instance profiles.
type untitled struct{ *simnode.Node }

func (d untitled) DeviceGetGpuInstanceProfileInfo(device nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	profile, err := d.Node.DeviceGetGpuInstanceProfileInfo(device, enum)
	profile.Name = "MIG " + profile.Name
	return profile, err
}

func (d untitled) DeviceGetName(device nvml.Device) (string, error) {
	name, err := d.Node.DeviceGetName(device)
	name, _, _ = strings.Cut(name, " MIG ")
	return name, err
}

// TestScanProfiles checks that partitions are identified by the driver's profile names, or by the product name
// without them.
func TestScanProfiles(t *testing.T) {
	for _, name := range []string{
		"dgx-a100+all-1g.10gb", "mixed+all-1c.2g.10gb", "a30x4+all-2g.12gb+me", "rtx-pro-6000+all-2g.48gb.gfx",
	} {
		t.Run(name, func(t *testing.T) {
			want, err := nvml.Scan(simulate(t, name))
			must(t, err)
			got, err := nvml.Scan(nameless{simulate(t, name)})
			must(t, err)
			if len(want[0].Partitions) == 0 {
				t.Fatal("no partitions")
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("without profile names (-with +without):\n%s", diff)
			}
			got, err = nvml.Scan(untitled{simulate(t, name)})
			must(t, err)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("without product names (-with +without):\n%s", diff)
			}
		})
	}
}
