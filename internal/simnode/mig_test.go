package simnode_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/test/nvmltest"
)

// The published profile IDs of 7-slice GPUs (nvidia-smi mig -lgip).
const (
	whole7g, half4g, half3g, quarter2g, quarter1g, eighth1g, eighth1gMedia = 0, 5, 9, 14, 15, 19, 20
)

func TestCreateGPUInstance(t *testing.T) {
	type instance struct{ profile, start int }
	tests := []struct {
		name string
		node string
		have []instance
		add  instance
		want nvml.Return
	}{
		{"empty GPU", "dgx-a100+all-enabled", nil, instance{eighth1g, 6}, nvml.Success},
		{"MIG off", "dgx-a100", nil, instance{eighth1g, 0}, nvml.NotSupported},
		{"GPU without MIG", "t4", nil, instance{eighth1g, 0}, nvml.NotSupported},
		{"no such profile", "dgx-a100+all-enabled", nil, instance{1, 0}, nvml.InvalidArgument},
		{"slot the shape cannot start at", "dgx-a100+all-enabled", nil, instance{quarter2g, 1}, nvml.InvalidArgument},
		{"slot taken", "dgx-a100+all-enabled", []instance{{eighth1g, 0}}, instance{eighth1g, 0}, nvml.InsufficientResources},
		{"slot overlapped", "dgx-a100+all-enabled", []instance{{half3g, 0}}, instance{quarter2g, 2}, nvml.InsufficientResources},
		{"no slot left", "dgx-a100+all-enabled", []instance{{whole7g, 0}}, instance{eighth1g, 6}, nvml.InsufficientResources},
		{"no slice left", "dgx-a100+all-enabled", []instance{{half3g, 0}, {half3g, 4}}, instance{eighth1g, 6}, nvml.InsufficientResources},
		{"beside", "dgx-a100+all-enabled", []instance{{half4g, 0}}, instance{half3g, 4}, nvml.Success},
		{"more than there are", "dgx-a100+all-enabled", []instance{{eighth1gMedia, 0}}, instance{eighth1gMedia, 1}, nvml.InsufficientResources},
		{"double memory", "dgx-a100+all-enabled", []instance{{quarter1g, 0}, {quarter1g, 2}, {quarter1g, 4}}, instance{quarter1g, 6}, nvml.Success},
		{"all media engines taken", "rtx-pro-6000+all-enabled", []instance{{65, 0}}, instance{14, 1}, nvml.InsufficientResources},
		{"without media engines beside all", "rtx-pro-6000+all-enabled", []instance{{65, 0}}, instance{67, 1}, nvml.Success},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			node := open(t, test.node)
			for _, i := range test.have {
				_, err := nvmltest.CreateGPUInstance(node, 0, i.profile, i.start)
				must(t, err)
			}
			if _, err := nvmltest.CreateGPUInstance(node, 0, test.add.profile, test.add.start); returned(err) != test.want {
				t.Errorf("returned %v, want %s", err, test.want)
			}
		})
	}
}

// returned is the return code in an error.
func returned(err error) nvml.Return {
	if err == nil {
		return nvml.Success
	}
	code, _ := errors.AsType[nvml.Return](err)
	return code
}

// TestPartitionLifecycle creates and destroys a partition.
func TestPartitionLifecycle(t *testing.T) {
	node := open(t, "dgx-a100+all-enabled")
	expect := func(what string, err error, want nvml.Return) {
		t.Helper()
		if returned(err) != want {
			t.Fatalf("%s: %v, want %s", what, err, want)
		}
	}
	gi, err := nvmltest.CreateGPUInstance(node, 2, half3g, 4)
	must(t, err)
	_, _, err = nvmltest.CreateComputeInstance(node, 2, gi, 4)
	expect("more slices than the instance has", err, nvml.NotSupported)
	first, uuid, err := nvmltest.CreateComputeInstance(node, 2, gi, 1)
	must(t, err)
	second, _, err := nvmltest.CreateComputeInstance(node, 2, gi, 2)
	must(t, err)
	_, _, err = nvmltest.CreateComputeInstance(node, 2, gi, 1)
	expect("more slices than are left", err, nvml.InsufficientResources)
	_, _, err = nvmltest.CreateComputeInstance(node, 2, gi+1, 1)
	expect("in an unknown instance", err, nvml.NotFound)

	partitions := scan(t, node)[2].Partitions
	if len(partitions) != 2 {
		t.Fatalf("%d partitions, want 2", len(partitions))
	}
	p := partitions[0]
	if p.UUID != uuid || p.Profile.String() != "1c.3g.20gb" || p.Placement != (mig.Placement{Start: 4, Size: 4}) || p.Memory != 20<<30 {
		t.Errorf("first partition is %+v", p)
	}
	if got := partitions[1].Profile.String(); got != "2c.3g.20gb" {
		t.Errorf("second partition is %s", got)
	}

	expect("MIG off with partitions", nvmltest.SetMIG(node, 2, false), nvml.InUse)
	expect("instance with partitions", nvmltest.DestroyGPUInstance(node, 2, gi), nvml.InUse)
	must(t, node.AddProcess(2, 0, 4711, 1<<30))
	expect("partition with a process", nvmltest.DestroyComputeInstance(node, 2, gi, first), nvml.InUse)
	must(t, node.RemoveProcess(2, 0, 4711))
	must(t, nvmltest.DestroyComputeInstance(node, 2, gi, first))
	expect("partition that is gone", nvmltest.DestroyComputeInstance(node, 2, gi, first), nvml.NotFound)

	again, other, err := nvmltest.CreateComputeInstance(node, 2, gi, 1)
	must(t, err)
	if again != first || other == uuid {
		t.Errorf("made again it has ID %d and UUID %s, want %d and another than %s", again, other, first, uuid)
	}
	must(t, nvmltest.DestroyComputeInstance(node, 2, gi, again))
	must(t, nvmltest.DestroyComputeInstance(node, 2, gi, second))
	must(t, nvmltest.DestroyGPUInstance(node, 2, gi))
	expect("instance that is gone", nvmltest.DestroyGPUInstance(node, 2, gi), nvml.NotFound)
	if left := scan(t, node)[2].Partitions; left != nil {
		t.Errorf("left: %v", left)
	}
	must(t, node.Lose(2))
	_, err = nvmltest.CreateGPUInstance(node, 2, half3g, 4)
	expect("on a lost GPU", err, nvml.GPUIsLost)
	_, err = nvmltest.CreateGPUInstance(node, 8, half3g, 4)
	expect("on an unknown GPU", err, nvml.InvalidArgument)
}

// TestFigures checks that every partition of every MIG model has figures, and some against NVIDIA's MIG User
// Guide.
func TestFigures(t *testing.T) {
	got := map[string]nvml.Attributes{}
	firsts := map[string]string{
		"a100-40": "1g.5gb", "a100-40-pcie": "1g.5gb", "a100-80": "1g.10gb", "a100-80-pcie": "1g.10gb", "a100x": "1g.10gb", "a30": "1g.6gb", "a30x": "1g.6gb",
		"b200": "1g.23gb", "b300": "1g.34gb", "gb200": "1g.23gb", "gb200-189": "1g.24gb", "gb300": "1g.35gb", "gh200": "1g.12gb", "gh200-144": "1g.18gb",
		"h100": "1g.10gb", "h100-64": "1g.8gb", "h100-94": "1g.12gb", "h100-nvl": "1g.12gb", "h100-pcie": "1g.10gb", "h20": "1g.12gb", "h20-141": "1g.18gb",
		"h200": "1g.18gb", "h200-nvl": "1g.18gb", "rtx-pro-4500": "1g.16gb", "rtx-pro-5000": "1g.24gb",
		"rtx-pro-6000": "1g.24gb", "rtx-pro-6000-max-q": "1g.24gb", "rtx-pro-6000-workstation": "1g.24gb",
	}
	for _, m := range simnode.MIGModels() {
		if firsts[m] == "" {
			t.Errorf("%s has MIG and no row here", m)
		}
	}
	for model, first := range firsts {
		node := open(t, model+"+all-enabled")
		state, err := nvml.NewPartitioner(node, nil).State(t.Context(), scan(t, node)[0].UUID)
		must(t, err)
		geometry := state.Geometry
		if len(geometry.Profiles) == 0 || geometry.Profiles[0].Profile.String() != first {
			t.Errorf("%s has no MIG", model)
		}
		for _, info := range geometry.Profiles {
			gi, err := nvmltest.CreateGPUInstance(node, 0, info.ID, info.Starts[0])
			must(t, err)
			ci, _, err := nvmltest.CreateComputeInstance(node, 0, gi, info.Profile.Slices)
			must(t, err)
			partition := scan(t, node)[0].Partitions[0]
			if has := partition.Attributes; partition.Profile != info.Profile || has.Multiprocessors < 10*info.Profile.Slices || has.CopyEngines == 0 {
				t.Errorf("%s: partition %s has %+v", model, partition.Profile, has)
			}
			got[model+" "+info.Profile.String()] = partition.Attributes
			must(t, nvmltest.DestroyComputeInstance(node, 0, gi, ci))
			if nvmltest.DestroyGPUInstance(node, 0, gi) != nil { // It lingers at the first call.
				must(t, nvmltest.DestroyGPUInstance(node, 0, gi))
			}
		}
	}
	for partition, want := range map[string]nvml.Attributes{
		"a100-40 3g.20gb":   {MemoryMiB: 20480, Multiprocessors: 42, GPUSlices: 3, ComputeSlices: 3, CopyEngines: 3, Decoders: 2},
		"a30 2g.12gb+me":    {MemoryMiB: 12288, Multiprocessors: 28, GPUSlices: 2, ComputeSlices: 2, CopyEngines: 2, Decoders: 2, JPEGEngines: 1, OFAEngines: 1},
		"h100 1g.20gb":      {MemoryMiB: 20096, Multiprocessors: 26, GPUSlices: 1, ComputeSlices: 1, CopyEngines: 1, Decoders: 1, JPEGEngines: 1},
		"h200 4g.71gb":      {MemoryMiB: 71424, Multiprocessors: 64, GPUSlices: 4, ComputeSlices: 4, CopyEngines: 4, Decoders: 4, JPEGEngines: 4},
		"h100-nvl 2g.24gb":  {MemoryMiB: 23957, Multiprocessors: 32, GPUSlices: 2, ComputeSlices: 2, CopyEngines: 2, Decoders: 2, JPEGEngines: 2},
		"h200-nvl 7g.141gb": {MemoryMiB: 143771, Multiprocessors: 132, GPUSlices: 7, ComputeSlices: 7, CopyEngines: 8, Decoders: 7, JPEGEngines: 7, OFAEngines: 1},
		"h100-pcie 3g.40gb": {MemoryMiB: 40779, Multiprocessors: 46, GPUSlices: 3, ComputeSlices: 3, CopyEngines: 3, Decoders: 3, JPEGEngines: 3},
		"rtx-pro-5000 1g.24gb+me.all": {
			MemoryMiB: 24467, Multiprocessors: 54, GPUSlices: 1, ComputeSlices: 1, CopyEngines: 1, Decoders: 3, Encoders: 3, JPEGEngines: 1, OFAEngines: 1,
		},
		"gb200 1g.23gb+me":        {MemoryMiB: 23683, Multiprocessors: 18, GPUSlices: 1, ComputeSlices: 1, CopyEngines: 2, Decoders: 1, JPEGEngines: 1, OFAEngines: 1},
		"rtx-pro-6000 1g.24gb-me": {MemoryMiB: 24471, Multiprocessors: 46, GPUSlices: 1, ComputeSlices: 1, CopyEngines: 1},
		"rtx-pro-6000-max-q 2g.48gb+me.all": {
			MemoryMiB: 48943, Multiprocessors: 94, GPUSlices: 2, ComputeSlices: 2, CopyEngines: 2, Decoders: 4, Encoders: 4, JPEGEngines: 4, OFAEngines: 1,
		},
	} {
		if got[partition] != want {
			t.Errorf("%s has %+v, want %+v", partition, got[partition], want)
		}
	}
}

// TestSetMIG checks a change of MIG mode in each world: the activation status, and the modes afterwards, after a
// reset and after a reboot.
func TestSetMIG(t *testing.T) {
	on, off, pending := nvml.MIGMode{Current: true, Pending: true}, nvml.MIGMode{}, nvml.MIGMode{Pending: true}
	for _, test := range []struct {
		node, world               string
		process                   bool
		activation                nvml.Return
		now, afterReset, rebooted nvml.MIGMode
	}{
		{"dgx-a100", "", false, nvml.Success, on, on, on},
		{"dgx-h100", "", false, nvml.Success, on, on, off},
		{"dgx-a100", "passthrough", false, nvml.ResetRequired, pending, pending, on},
		{"dgx-h100", "passthrough", false, nvml.Success, on, on, off},
		{"dgx-a100", "", true, nvml.InUse, pending, on, on},
		{"dgx-a100", "own-pids", true, nvml.InUse, pending, on, on},
		{"dgx-h100", "client=dcgm", false, nvml.InUse, pending, on, off},
	} {
		t.Run(test.node+" "+test.world, func(t *testing.T) {
			node := open(t, test.node)
			must(t, node.SetWorld(test.world))
			if test.process {
				must(t, node.AddProcess(0, simnode.WholeGPU, 4711, 0))
			}
			device, err := node.DeviceGetHandleByIndex(0)
			must(t, err)
			activation, err := node.DeviceSetMigMode(device, true)
			must(t, err)
			expect := func(when string, want nvml.MIGMode) {
				t.Helper()
				device, err := node.DeviceGetHandleByIndex(0)
				must(t, err)
				if got, err := node.DeviceGetMigMode(device); got != want || err != nil {
					t.Errorf("%s the mode is %+v, %v, want %+v", when, got, err, want)
				}
			}
			if activation != test.activation {
				t.Errorf("activation %s, want %s", activation, test.activation)
			}
			expect("after the call", test.now)
			must(t, node.Heal(0))
			expect("after a reset", test.afterReset)
			node.Reboot()
			expect("after a reboot", test.rebooted)
		})
	}
	node := open(t, "t4")
	if err := nvmltest.SetMIG(node, 0, true); returned(err) != nvml.NotSupported {
		t.Errorf("a GPU without MIG: %v", err)
	}
}

// TestMinorNumbers checks that device nodes are not numbered like GPUs, and that in one world a change of MIG
// mode moves a GPU's node to another GPU's former number.
func TestMinorNumbers(t *testing.T) {
	for world, want := range map[string][]int{"": {1, 0}, "moving-minors": {2, 1}} {
		node := open(t, "a100-40x2")
		must(t, node.SetWorld(world))
		var got []int
		for gpu := range 2 {
			must(t, nvmltest.SetMIG(node, gpu, true))
		}
		for _, gpu := range scan(t, node) {
			got = append(got, gpu.Minor)
		}
		if !slices.Equal(got, want) {
			t.Errorf("world %q: minor numbers %v, want %v", world, got, want)
		}
	}
}

// TestUnprivileged checks which calls are refused without MIG rights: calls for instances, and calls of a GPU
// with MIG that cover all its instances. Events of partitions are not delivered.
func TestUnprivileged(t *testing.T) {
	node := open(t, "mixed") // GPU 0 is whole, GPU 2 partitioned.
	must(t, node.SetWorld("unprivileged"))
	whole, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	parent, err := node.DeviceGetHandleByIndex(2)
	must(t, err)
	partition, err := node.DeviceGetMigDeviceHandleByIndex(parent, 0)
	must(t, err)
	_, ofWhole := node.DeviceGetMemoryInfo(whole)
	_, ofParent := node.DeviceGetMemoryInfo(parent)
	_, ofPartition := node.DeviceGetMemoryInfo(partition)
	_, processes := node.DeviceGetComputeRunningProcesses(parent)
	_, processesOfPartition := node.DeviceGetComputeRunningProcesses(partition)
	_, instance := node.DeviceGetGpuInstanceById(parent, 1)
	_, mode := node.DeviceSetMigMode(whole, true)
	for what, err := range map[string]error{"memory": ofParent, "processes": processes, "instance": instance, "mode": mode} {
		if returned(err) != nvml.NoPermission {
			t.Errorf("%s: %v, want NO_PERMISSION", what, err)
		}
	}
	for what, err := range map[string]error{"memory of a whole GPU": ofWhole, "of a partition": ofPartition, "its processes": processesOfPartition} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	set := listen(t, node)
	must(t, node.XID(2, 94, 1, 0))
	must(t, node.XID(2, 95, nvml.WholeGPU, nvml.WholeGPU))
	if event, err := node.EventSetWait(set, time.Minute); event.Data != 95 || err != nil {
		t.Errorf("event %+v, %v, want that of the whole GPU alone", event, err)
	}
}

// TestMonitorOnly checks that with only the right to monitor MIG, it can be read but not changed.
func TestMonitorOnly(t *testing.T) {
	node := open(t, "a100-40+all-1g.5gb")
	must(t, node.SetWorld("monitor-only"))
	parent, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	instance, err := node.DeviceGetGpuInstanceById(parent, 1)
	must(t, err)
	compute, err := node.GpuInstanceGetComputeInstanceById(instance, 0)
	must(t, err)
	_, memory := node.DeviceGetMemoryInfo(parent)
	must(t, memory)
	_, mode := node.DeviceSetMigMode(parent, false)
	_, create := node.DeviceCreateGpuInstanceWithPlacement(parent, eighth1g, mig.Placement{Start: 0, Size: 1})
	_, createCompute := node.GpuInstanceCreateComputeInstance(instance, 0)
	for what, err := range map[string]error{
		"mode": mode, "create": create, "create compute": createCompute,
		"destroy compute": node.ComputeInstanceDestroy(compute), "destroy": node.GpuInstanceDestroy(instance),
	} {
		if returned(err) != nvml.NoPermission {
			t.Errorf("%s: %v, want NO_PERMISSION", what, err)
		}
	}
}

// TestCodes checks the codes for features that a GPU or an instance does not have.
func TestCodes(t *testing.T) {
	node := open(t, "mixed") // GPU 2 has instances, GPU 4 is a T4.
	handle := func(gpu int) nvml.Device {
		t.Helper()
		device, err := node.DeviceGetHandleByIndex(gpu)
		must(t, err)
		return device
	}
	parent, whole := handle(2), handle(4)
	instance, err := node.DeviceGetGpuInstanceById(parent, 1)
	must(t, err)
	_, rows := node.DeviceGetRemappedRows(parent)
	_, partition := node.DeviceGetMigDeviceHandleByIndex(whole, 0)
	_, placements := node.DeviceGetGpuInstancePossiblePlacements(whole, eighth1g)
	_, computes := node.GpuInstanceGetComputeInstances(instance, 4) // 7 slices.
	for what, err := range map[string]error{"rows": rows, "MIG device": partition, "placements": placements, "compute instances": computes} {
		if returned(err) != nvml.NotSupported {
			t.Errorf("%s: %v, want NOT_SUPPORTED", what, err)
		}
	}
	if rows, err := node.DeviceGetRemappedRows(handle(1)); err != nil {
		t.Errorf("rows of a GPU without instances: %+v, %v", rows, err)
	}
	// A handle of a destroyed object is invalid.
	for _, c := range node.GPUs()[2].Partitions {
		must(t, nvmltest.DestroyComputeInstance(node, 2, c.GPUInstance, c.ComputeInstance))
	}
	if err := node.GpuInstanceDestroy(instance); returned(err) != nvml.InUse {
		t.Errorf("an instance that was in use a moment ago: %v, want IN_USE", err)
	}
	must(t, node.GpuInstanceDestroy(instance))
	if _, err := node.GpuInstanceGetInfo(instance); returned(err) != nvml.InvalidArgument {
		t.Errorf("a destroyed instance: %v", err)
	}
}

// TestClientAndOwnPIDs checks that another program prevents instances from being destroyed, and so do processes
// of other PID namespaces, although they are in no list.
func TestClientAndOwnPIDs(t *testing.T) {
	node := open(t, "a100-40+all-1g.5gb")
	must(t, node.SetWorld("client=dcgm"))
	if err := nvmltest.DestroyComputeInstance(node, 0, 1, 0); returned(err) != nvml.InUse {
		t.Errorf("with a client: %v", err)
	}
	must(t, node.SetWorld("own-pids"))
	must(t, node.AddProcess(0, 0, 4711, 0))
	device, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	if processes, err := node.DeviceGetComputeRunningProcesses(device); len(processes) != 0 || err != nil {
		t.Errorf("processes %v, %v", processes, err)
	}
	if err := nvmltest.DestroyComputeInstance(node, 0, 1, 0); returned(err) != nvml.InUse {
		t.Errorf("with a process that is not listed: %v", err)
	}
}

// TestProfileNumbers checks that NVML's enumeration and the published profile IDs differ, with holes and an end.
func TestProfileNumbers(t *testing.T) {
	node := open(t, "dgx-a100")
	device, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	want := map[int]nvml.GPUInstanceProfile{
		0: {ID: eighth1g, Slices: 1, Instances: 7, MemoryMB: 5120, Engines: mig.Engines{Multiprocessors: 14, CopyEngines: 1}, Name: "1g.5gb"},
		4: {ID: whole7g, Slices: 7, Instances: 1, MemoryMB: 40960, Engines: mig.Engines{Multiprocessors: 98, CopyEngines: 7, Decoders: 5, JPEGEngines: 1, OFAEngines: 1}, Name: "7g.40gb"},
		9: {ID: quarter1g, Slices: 1, Instances: 4, MemoryMB: 10240, Engines: mig.Engines{Multiprocessors: 14, CopyEngines: 1, Decoders: 1}, Name: "1g.10gb"},
	}
	for enum, profile := range want {
		if got, err := node.DeviceGetGpuInstanceProfileInfo(device, enum); got != profile || err != nil {
			t.Errorf("profile %d is %+v, %v, want %+v", enum, got, err, profile)
		}
	}
	if _, err := node.DeviceGetGpuInstanceProfileInfo(device, 5); returned(err) != nvml.NotSupported {
		t.Errorf("a hole: %v, want NOT_SUPPORTED", err)
	}
	if _, err := node.DeviceGetGpuInstanceProfileInfo(device, 18); returned(err) != nvml.InvalidArgument {
		t.Errorf("the end: %v, want INVALID_ARGUMENT", err)
	}
}
