package simnode_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// TestMemoryFull checks that processes never use more memory than the GPU has.
func TestMemoryFull(t *testing.T) {
	node := open(t, "t4")
	device, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	const total = 15360 << 20
	for pid, step := range []struct{ bytes, used uint64 }{
		{1 << 30, 1 << 30},
		{nvml.MemoryUnknown, 1 << 30},
		{1 << 50, total},
	} {
		must(t, node.AddProcess(0, simnode.WholeGPU, pid, step.bytes))
		want := nvml.MemoryInfo{Total: total, Used: step.used, Free: total - step.used}
		if got, err := node.DeviceGetMemoryInfo(device); got != want || err != nil {
			t.Errorf("with process %d: memory %+v, %v, want %+v", pid, got, err, want)
		}
	}
}

// TestDoProcessTwice is not in the table of TestDo because it takes two steps.
func TestDoProcessTwice(t *testing.T) {
	node := open(t, "t4")
	arguments := map[string]string{"gpu": "0", "pid": "1"}
	must(t, node.Do("process-add", arguments))
	if err := node.Do("process-add", arguments); err == nil || !strings.Contains(err.Error(), "process 1 is there already") {
		t.Errorf("second time: %v", err)
	}
}

// TestAddAgain checks that a lost GPU is as good as new when it is removed and added again, and that the number
// of GPUs is limited.
func TestAddAgain(t *testing.T) {
	node := open(t, "t4")
	must(t, node.Lose(0))
	must(t, node.SetTemperature(0, 99))
	must(t, node.AddProcess(0, simnode.WholeGPU, 1, 1<<20))
	must(t, node.Remove(0))
	gpu, err := node.Add("")
	must(t, err)
	device, err := node.DeviceGetHandleByIndex(gpu)
	must(t, err)
	if celsius, err := node.DeviceGetTemperature(device); celsius != 34 || err != nil {
		t.Errorf("%d °C, %v", celsius, err)
	}
	if processes, err := node.DeviceGetComputeRunningProcesses(device); len(processes) > 0 || err != nil {
		t.Errorf("processes %v, %v", processes, err)
	}
	for err == nil && gpu < 100 {
		gpu, err = node.Add("t4")
	}
	if err == nil || !strings.Contains(err.Error(), "64 GPUs") {
		t.Errorf("added %d GPUs, %v", gpu, err)
	}
}

// TestDriverSettings checks who may set time slice and compute mode, on which GPUs, how a mode affects processes,
// and what resets both.
func TestDriverSettings(t *testing.T) {
	open := func(world string) (*simnode.Node, nvml.Device, nvml.Device) {
		node, err := simnode.New("mixed") // GPU 0 is whole, GPU 2 partitioned.
		if err == nil {
			err = node.SetWorld(world)
		}
		if err == nil {
			err = node.Init()
		}
		whole, failed := node.DeviceGetHandleByIndex(0)
		parent, missing := node.DeviceGetHandleByIndex(2)
		if err := errors.Join(err, failed, missing); err != nil {
			t.Fatal(err)
		}
		return node, whole, parent
	}
	for _, world := range []string{"unprivileged", "monitor-only"} {
		node, whole, _ := open(world)
		if err := node.DeviceSetComputeMode(whole, nvml.ComputeExclusiveProcess); !errors.Is(err, nvml.NoPermission) {
			t.Errorf("%s: %v, want NO_PERMISSION", world, err)
		}
		if err := node.SetTimeSlice(node.GPUs()[0].UUID, sharing.LongTimeSlice); err == nil {
			t.Errorf("%s may set the time slice", world)
		}
	}
	node, _, parent := open("")
	if err := node.DeviceSetComputeMode(parent, nvml.ComputeDefault); !errors.Is(err, nvml.NotSupported) {
		t.Errorf("with MIG: %v, want NOT_SUPPORTED", err)
	}
	for _, uuid := range []string{node.GPUs()[2].UUID, "GPU-none"} {
		if node.SetTimeSlice(uuid, sharing.LongTimeSlice) == nil {
			t.Errorf("time slice of %s is set", uuid)
		}
	}
	for what, lose := range map[string]func() error{
		"reset":  func() error { return node.Heal(0) },
		"reboot": func() error { node.Reboot(); return nil },
		"last program gone": func() error {
			return errors.Join(node.Shutdown(), node.Init())
		},
	} {
		whole, err := node.DeviceGetHandleByIndex(0)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(node.DeviceSetComputeMode(whole, nvml.ComputeExclusiveProcess), node.SetTimeSlice(node.GPUs()[0].UUID, sharing.LongTimeSlice)); err != nil {
			t.Fatal(err)
		}
		if err := node.AddProcess(0, simnode.WholeGPU, 10, 0); err != nil {
			t.Fatal(err)
		}
		if node.AddProcess(0, simnode.WholeGPU, 11, 0) == nil {
			t.Error("a second process on a GPU for one")
		}
		if err := errors.Join(node.RemoveProcess(0, simnode.WholeGPU, 10), lose()); err != nil {
			t.Fatal(err)
		}
		if gpu := node.GPUs()[0]; gpu.ComputeMode != nvml.ComputeDefault || gpu.TimeSlice != "" {
			t.Errorf("after a %s: %+v", what, gpu)
		}
	}
}

// TestEnergyAndErrors checks a GPU's counters since the driver was loaded, and over its life.
func TestEnergyAndErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := open(t, "t4")
		counts := func(when string, millijoules, errors, ever uint64) {
			t.Helper()
			gpu, err := node.DeviceGetHandleByIndex(0)
			must(t, err)
			if got, err := node.DeviceGetTotalEnergyConsumption(gpu); got != millijoules || err != nil {
				t.Errorf("%s: %d mJ, %v, want %d", when, got, err, millijoules)
			}
			for aggregate, want := range map[bool]uint64{false: errors, true: ever} {
				counter := nvml.MemoryErrorCounter{Uncorrected: true, Aggregate: aggregate, Location: nvml.DRAM}
				if got, err := node.DeviceGetMemoryErrorCounter(gpu, counter); got != want || err != nil {
					t.Errorf("%s: %+v: %d, %v, want %d", when, counter, got, err, want)
				}
			}
		}
		must(t, node.SetPower(0, 10))
		must(t, node.ECC(0, true))
		pass(3 * time.Second)
		counts("after 3 s of 10 W", 30_000, 1, 1)
		must(t, node.SetPower(0, 20))
		pass(2 * time.Second)
		counts("and 2 s of 20 W", 70_000, 1, 1)
		must(t, node.Heal(0))
		counts("after a reset", 70_000, 1, 1)
		must(t, node.Shutdown())
		must(t, node.Reload())
		must(t, node.Init())
		counts("after the driver was loaded", 0, 0, 1)
		must(t, node.ECC(0, true))
		pass(time.Second)
		counts("a second later", 55_000, 1, 2)
		node.Reboot()
		counts("after a reboot", 0, 0, 2)
	})
}
