package simnode_test

import (
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
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

// TestAddAgain checks that a lost GPU that was removed is as good as new when it is
// added again, and that the number of GPUs is limited.
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
