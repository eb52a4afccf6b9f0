package gpu

import (
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
)

// TestInventory checks that the GPUs are those of nvidia-smi.
func TestInventory(t *testing.T) {
	program(t)
	lib := open(t)
	start := time.Now()
	gpus, err := nvml.Scan(lib)
	must(t, err)
	note(t, "", "scan with the driver", elapsed(start))
	var got [][]string
	for _, gpu := range gpus {
		got = append(got, []string{
			strconv.Itoa(gpu.Index), gpu.UUID, gpu.PCIBusID, gpu.Model, strconv.FormatUint(gpu.Memory>>20, 10),
		})
		note(t, "GPU "+strconv.Itoa(gpu.Index), "inventory", gpu)
	}
	if diff := cmp.Diff(query(t, "gpu=index,uuid,pci.bus_id,name,memory.total"), got); diff != "" {
		t.Errorf("GPUs (-nvidia-smi +virgate):\n%s", diff)
	}
}

// TestPartitions checks that the partitions are those of nvidia-smi -L.
func TestPartitions(t *testing.T) {
	program(t)
	gpus, err := nvml.Scan(open(t))
	must(t, err)
	var got []string
	for _, gpu := range gpus {
		for _, partition := range gpu.Partitions {
			got = append(got, partition.UUID)
		}
	}
	output, err := exec.CommandContext(t.Context(), "nvidia-smi", "-L").Output()
	must(t, err)
	want := regexp.MustCompile(`MIG-[0-9a-f-]{36}`).FindAllString(string(output), -1)
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("partitions (-nvidia-smi +virgate):\n%s", diff)
	}
}

// TestProcesses checks that the memory of processes is what nvidia-smi reports. Both look at one moment, so
// a busy machine takes several attempts.
func TestProcesses(t *testing.T) {
	program(t)
	lib := open(t)
	var diff string
	for range 10 {
		want := map[string]string{}
		for _, row := range query(t, "compute-apps=gpu_uuid,pid,used_memory") {
			want[row[0]+" "+row[1]] = row[2]
		}
		if diff = cmp.Diff(want, processes(t, lib)); diff == "" {
			note(t, "", "processes", len(want))
			return
		}
	}
	t.Errorf("processes (-nvidia-smi +virgate):\n%s", diff)
}

// processes returns the memory in MiB by GPU and process, in nvidia-smi's format.
func processes(t *testing.T, lib nvml.Library) map[string]string {
	t.Helper()
	found := map[string]string{}
	count, err := lib.DeviceGetCount()
	must(t, err)
	for index := range count {
		device, err := lib.DeviceGetHandleByIndex(index)
		must(t, err)
		uuid, err := lib.DeviceGetUUID(device)
		must(t, err)
		running, err := lib.DeviceGetComputeRunningProcesses(device)
		must(t, err)
		for _, p := range running {
			memory := "[N/A]"
			if p.Memory != nvml.MemoryUnknown {
				memory = strconv.FormatUint(p.Memory>>20, 10)
			}
			found[uuid+" "+strconv.Itoa(p.PID)] = memory
		}
	}
	return found
}
