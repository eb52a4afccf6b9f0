package simnode

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

// lists are the PIDs in the driver's lists of compute processes and for MPS.
func lists(t *testing.T, n *Node, device nvml.Device) (compute, mps []int) {
	t.Helper()
	pids := func(list []nvml.Process, err error) (pids []int) {
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range list {
			pids = append(pids, p.PID)
		}
		return pids
	}
	return pids(n.DeviceGetComputeRunningProcesses(device)), pids(n.DeviceGetMPSComputeRunningProcesses(device))
}

func TestMPS(t *testing.T) {
	n, err := New("t4")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Init(); err != nil {
		t.Fatal(err)
	}
	device, err := n.DeviceGetHandleByIndex(0)
	if err != nil {
		t.Fatal(err)
	}
	uuid, _ := n.DeviceGetUUID(device)
	refused := func(err error, why string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%v, want %q", err, why)
		}
	}
	setMode := func(mode nvml.ComputeMode) {
		t.Helper()
		if err := n.DeviceSetComputeMode(device, mode); err != nil {
			t.Fatal(err)
		}
	}
	mps := n.MPS()
	refused(mps.AddClient(uuid, 100), "no MPS server")
	_, err = mps.Start("GPU-none")
	refused(err, "no GPU or partition GPU-none")
	setMode(nvml.ComputeProhibited)
	_, err = mps.Start(uuid)
	refused(err, "busy")

	setMode(nvml.ComputeExclusiveProcess)
	if err := n.AddProcess(0, WholeGPU, 1, 1<<20); err != nil {
		t.Fatal(err)
	}
	_, err = mps.Start(uuid)
	refused(err, "busy")
	_ = n.RemoveProcess(0, WholeGPU, 1)

	server, err := mps.Start(uuid)
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range []int{101, 100} {
		if err := mps.AddClient(uuid, pid); err != nil {
			t.Fatal(err)
		}
	}
	refused(mps.AddClient(uuid, 100), "there already")
	refused(n.AddProcess(0, WholeGPU, 2, 0), "busy") // Not a client.
	if compute, clients := lists(t, n, device); !slices.Equal(compute, []int{server}) || !slices.Equal(clients, []int{100, 101}) {
		t.Errorf("compute %v, MPS %v", compute, clients)
	}
	if got, known := (proc{n}).read("100/comm"); !known || got != "work\n" {
		t.Errorf("a client is %q", got)
	}
	if got, known := (proc{n}).read(strconv.Itoa(server) + "/comm"); !known || got != "nvidia-cuda-mps\n" {
		t.Errorf("the server is %q", got)
	}
	memory, _ := n.DeviceGetMemoryInfo(device)
	if used := memory.Used; used < mpsServerBytes+2*mpsClientBytes {
		t.Errorf("%d bytes used", used)
	}
	mps.RemoveClient(uuid, 101)
	if _, clients := lists(t, n, device); !slices.Equal(clients, []int{100}) {
		t.Errorf("MPS %v", clients)
	}
	mps.Stop(uuid, server) // With its last client.
	if compute, clients := lists(t, n, device); compute != nil || clients != nil {
		t.Errorf("after the end: compute %v, MPS %v", compute, clients)
	}
	if err := n.AddProcess(0, WholeGPU, 100, 0); err != nil { // No longer a client.
		t.Fatal(err)
	}
	if compute, clients := lists(t, n, device); !slices.Equal(compute, []int{100}) || clients != nil {
		t.Errorf("after the end: compute %v, MPS %v", compute, clients)
	}
}

// TestMPSPartition checks that a partition has its own server and clients.
func TestMPSPartition(t *testing.T) {
	n, err := New("dgx-a100+all-3g.20gb")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Init(); err != nil {
		t.Fatal(err)
	}
	parent, _ := n.DeviceGetHandleByIndex(0)
	var devices [2]nvml.Device
	var uuids [2]string
	for i := range devices {
		if devices[i], err = n.DeviceGetMigDeviceHandleByIndex(parent, i); err != nil {
			t.Fatal(err)
		}
		uuids[i], _ = n.DeviceGetUUID(devices[i])
	}
	server, err := n.MPS().Start(uuids[1])
	if err != nil {
		t.Fatal(err)
	}
	if err := n.MPS().AddClient(uuids[1], 100); err != nil {
		t.Fatal(err)
	}
	if err := n.MPS().AddClient(uuids[0], 101); err == nil {
		t.Error("a client of the other partition's server")
	}
	for i, want := range [2][]int{nil, {100}} {
		if _, clients := lists(t, n, devices[i]); !slices.Equal(clients, want) {
			t.Errorf("clients of partition %d: %v, want %v", i, clients, want)
		}
	}
	if compute, clients := lists(t, n, parent); !slices.Equal(compute, []int{server}) || !slices.Equal(clients, []int{100}) {
		t.Errorf("of the GPU: compute %v, MPS %v", compute, clients)
	}
}
