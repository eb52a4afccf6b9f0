package simnode_test

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/nvmltest"
)

// open makes a node with its driver open.
func open(t *testing.T, name string) *simnode.Node {
	t.Helper()
	node, err := simnode.New(name)
	must(t, err)
	must(t, node.Init())
	return node
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func scan(t *testing.T, node *simnode.Node) []sharing.GPU {
	t.Helper()
	gpus, err := nvml.Scan(node)
	must(t, err)
	return gpus
}

func TestNewNames(t *testing.T) {
	for _, name := range simnode.Names() {
		node, err := simnode.New(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if node.Name() != name {
			t.Errorf("%s calls itself %s", name, node.Name())
		}
	}
}

func TestNewErrors(t *testing.T) {
	tests := []struct {
		name string
		says []string
	}{
		{"", []string{`no simulated node ""`, "dgx-a100, "}},
		{"dgx-a1000", []string{`no simulated node "dgx-a1000"`, "a30x4", "mixed", "a100-80, a100-80-pcie"}},
		{"t4x", []string{"no simulated node"}},
		{"t4xx", []string{"no simulated node"}},
		{"t4x0", []string{"boards[0].count: 0 is not in 1 to 64"}},
		{"t4x-1", []string{"boards[0].count: -1"}},
		{"t4x99999", []string{"boards[0].count: 99999"}},
		{"t4+all-1g.5gb", []string{`"t4+all-1g.5gb"`, "Tesla T4", "no MIG"}},
		{"dgx-a100+all-1g.6gb", []string{"A100-SXM4-40GB", "1g.6gb", "1g.5gb"}},
		{"dgx-a100+7", []string{`"7"`, "all-balanced"}},
		{"dgx-a100+", []string{"all-balanced"}},
		{"empty+all-balanced", []string{"no GPU that could be partitioned"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := simnode.New(test.name)
			if err == nil {
				t.Fatal("no error")
			}
			for _, part := range test.says {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
		})
	}
}

// TestUUIDs checks that UUIDs are well formed, unique, the same every time,
// and not changed by a MIG layout.
func TestUUIDs(t *testing.T) {
	form := regexp.MustCompile(`^(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	seen := map[string]string{}
	for _, name := range simnode.Names() {
		node, err := simnode.New(name)
		must(t, err)
		for _, gpu := range scan(t, node) {
			for _, unit := range append(gpu.Partitions, sharing.Partition{UUID: gpu.UUID}) {
				if !form.MatchString(unit.UUID) {
					t.Errorf("%s: UUID %s", name, unit.UUID)
				}
				if other := seen[unit.UUID]; other != "" {
					t.Errorf("%s and %s both have %s", name, other, unit.UUID)
				}
				seen[unit.UUID] = name
			}
		}
	}
	partitioned, err := simnode.New("dgx-a100+all-balanced")
	must(t, err)
	if gpu := scan(t, partitioned)[3]; seen[gpu.UUID] != "dgx-a100" {
		t.Errorf("GPU 3 has another UUID with MIG")
	}
}

func TestLoadExample(t *testing.T) {
	data, err := os.ReadFile("testdata/lab.yaml")
	must(t, err)
	node, err := simnode.Load("testdata/lab.yaml", data)
	must(t, err)
	type gpuFacts struct {
		Model      string
		NUMANode   int
		MIG        bool
		Partitions int
	}
	var got []gpuFacts
	for _, gpu := range scan(t, node) {
		got = append(got, gpuFacts{gpu.Model, gpu.NUMANode, gpu.MIG, len(gpu.Partitions)})
	}
	want := []gpuFacts{
		{"NVIDIA A100-SXM4-40GB", 0, false, 0},
		{"NVIDIA A100-SXM4-40GB", 0, false, 0},
		{"NVIDIA A30", 1, true, 3},
		{"Tesla T4", -1, false, 0},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestLoad(t *testing.T) {
	tests := []struct {
		name, document string
		// says is in the error; if empty, there is no error, but this many GPUs.
		says string
		gpus int
	}{
		{"nothing", "", "", 0},
		{"one GPU", "boards: [{model: t4}]", "", 1},
		{"some GPUs", "boards: [{model: t4, count: 3}, {model: h100}]", "", 4},
		{"unknown model", "boards: [{model: t4}, {model: t5}]", `lab.yaml: boards[1].model: "t5" is none of a100-40`, 0},
		{"no model", "boards: [{count: 1}]", `boards[0].model: ""`, 0},
		{"no GPU", "boards: [{model: t4, count: 0}]", "boards[0].count: 0", 0},
		{"too many", "boards: [{model: t4, count: 40}, {model: t4, count: 40}]", "boards: 80 are more than 64", 0},
		{"bad NUMA node", "boards: [{model: t4, numaNode: -2}]", "boards[0].numaNode: -2", 0},
		{"bad layout", "boards: [{model: a30}, {model: a30, layout: all-9g.9gb}]", "boards[1].layout: NVIDIA A30", 0},
		{"unknown field", "boards: [{kind: t4}]", "kind", 0},
		{"unknown field at the top", "gpus: []", "gpus", 0},
		{"wrong type", "boards: [{model: t4, count: many}]", "count", 0},
		{"no YAML", "boards: [", "lab.yaml", 0},
		{"a world", "{world: 'passthrough,client=dcgm', boards: [{model: t4}]}", "", 1},
		{"world without its number", "{world: unlisted=x, boards: [{model: t4}]}", `lab.yaml: world: world "unlisted=x": "x" is no number of GPUs`, 0},
		{"unknown world", "{world: moon, boards: [{model: t4}]}", `lab.yaml: world: no world "moon": there are unprivileged, monitor-only, passthrough, client=NAME`, 0},
		{"two problems", "boards: [{model: x}, {model: t4, count: 99}]", "boards[1].count: 99", 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			node, err := simnode.Load("lab.yaml", []byte(test.document))
			if test.says != "" {
				if err == nil || !strings.Contains(err.Error(), test.says) {
					t.Errorf("error %v does not say %q", err, test.says)
				}
				return
			}
			must(t, err)
			if got := len(scan(t, node)); got != test.gpus || node.Name() != "lab" {
				t.Errorf("%d GPUs on %s, want %d on lab", got, node.Name(), test.gpus)
			}
		})
	}
}

func FuzzLoad(f *testing.F) {
	data, err := os.ReadFile("testdata/lab.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte("boards: [{model: h200, layout: all-1c.3g.71gb}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		node, err := simnode.Load("fuzz.yaml", data)
		if err != nil {
			return
		}
		if _, err := nvml.Scan(node); err != nil {
			t.Errorf("a loaded node cannot be read: %v", err)
		}
	})
}

func FuzzNew(f *testing.F) {
	f.Add("dgx-a100+all-1g.5gb")
	f.Add("rtx-pro-6000x2+all-1g.24gb+me.all")
	f.Fuzz(func(t *testing.T, name string) {
		node, err := simnode.New(name)
		if err != nil {
			return
		}
		if _, err := nvml.Scan(node); err != nil {
			t.Errorf("node %q cannot be read: %v", name, err)
		}
	})
}

// TestUninitialized checks that all calls fail before Init and after Shutdown.
func TestUninitialized(t *testing.T) {
	node, err := simnode.New("t4")
	must(t, err)
	if _, err := node.DeviceGetCount(); !errors.Is(err, nvml.Uninitialized) {
		t.Errorf("before Init: %v", err)
	}
	must(t, node.Init())
	if count, err := node.DeviceGetCount(); count != 1 || err != nil {
		t.Errorf("DeviceGetCount() = %d, %v", count, err)
	}
	must(t, node.Shutdown())
	if err := node.Shutdown(); !errors.Is(err, nvml.Uninitialized) {
		t.Errorf("Shutdown twice: %v", err)
	}
}

func TestGPUs(t *testing.T) {
	n, err := simnode.New("a30x4+all-2g.12gb")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Init(); err != nil {
		t.Fatal(err)
	}
	before := n.GPUs()
	if err := n.Lose(0); err != nil {
		t.Fatal(err)
	}
	if err := n.Remove(1); err != nil {
		t.Fatal(err)
	}
	// The GPU after it has moved up.
	if err := nvmltest.DestroyComputeInstance(n, 1, 1, 0); err != nil {
		t.Fatal(err)
	}
	want := n.GPUs()
	copy(want, before)
	want[0].Lost = true
	want[1].Index = -1
	want[2].Index, want[2].Partitions = 1, before[2].Partitions[1:]
	want[3].Index = 2
	if diff := cmp.Diff(want, n.GPUs()); diff != "" {
		t.Error(diff)
	}
	first := simnode.GPU{MIG: true, Partitions: []simnode.Partition{
		{Profile: "2g.12gb", GPUInstance: 1}, {Profile: "2g.12gb", GPUInstance: 2},
	}}
	uuids := cmpopts.IgnoreFields(simnode.Partition{}, "UUID")
	if diff := cmp.Diff(first, before[0], uuids, cmpopts.IgnoreFields(simnode.GPU{}, "UUID")); diff != "" {
		t.Error(diff)
	}
}

// TestResetGPU checks that a GPU is reset as by nvidia-smi: not while a session that has looked it up is open.
func TestResetGPU(t *testing.T) {
	const busID = "00000000:07:00.0"
	for _, test := range []struct {
		name, world, want string
		do                func(t *testing.T, n *simnode.Node)
	}{
		{"nobody has it open", "", "", func(*testing.T, *simnode.Node) {}},
		{"the driver is open", "", "In use by another client", func(t *testing.T, n *simnode.Node) {
			must(t, n.Init())
		}},
		{"the driver is open, and another GPU", "lazy", "", func(t *testing.T, n *simnode.Node) {
			must(t, n.Init())
			_, err := n.DeviceGetHandleByIndex(1)
			must(t, err)
		}},
		{"looked up", "lazy", "In use by another client", func(t *testing.T, n *simnode.Node) {
			must(t, n.Init())
			_, err := n.DeviceGetHandleByIndex(0)
			must(t, err)
		}},
		{"one of two sessions ended", "", "In use by another client", func(t *testing.T, n *simnode.Node) {
			must(t, n.Init())
			must(t, n.Init())
			_, err := n.DeviceGetHandleByIndex(0)
			must(t, err)
			must(t, n.Shutdown())
		}},
		{"closed again", "", "", func(t *testing.T, n *simnode.Node) {
			must(t, n.Init())
			_, err := n.DeviceGetHandleByIndex(0)
			must(t, err)
			must(t, n.Shutdown())
		}},
		{"a process", "", "In use by another client", func(t *testing.T, n *simnode.Node) {
			must(t, n.AddProcess(0, simnode.WholeGPU, 4242, 1))
		}},
		{"another client", "client=dcgm", "In use by another client", func(*testing.T, *simnode.Node) {}},
		{"pass-through", "passthrough", "not supported", func(*testing.T, *simnode.Node) {}},
		{"lost", "", "GPU is lost", func(t *testing.T, n *simnode.Node) { must(t, n.Lose(0)) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			n, err := simnode.New("dgx-a100")
			must(t, err)
			must(t, n.SetWorld(test.world))
			must(t, n.Repair(0))
			test.do(t, n)
			err = n.ResetGPU(busID)
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Fatalf("%v, want %q", err, test.want)
			}
			if verb := n.Do("reset", map[string]string{"gpu": "0"}); (verb == nil) != (err == nil) {
				t.Errorf("sim reset: %v", verb)
			}
			must(t, n.Init())
			device, lost := n.DeviceGetHandleByIndex(0)
			rows, _ := n.DeviceGetRemappedRows(device)
			if lost == nil && rows.Pending != (test.want != "") {
				t.Errorf("rows wait for a reset: %v", rows.Pending)
			}
		})
	}
	n, err := simnode.New("dgx-a100")
	must(t, err)
	if err := n.ResetGPU("00000000:FF:00.0"); err == nil || !strings.Contains(err.Error(), "00000000:FF:00.0") {
		t.Errorf("no such GPU: %v", err)
	}
}

// TestHandlesEndWithTheDriver checks that handles of an earlier session are invalid.
func TestHandlesEndWithTheDriver(t *testing.T) {
	n, err := simnode.New("dgx-a100+all-1g.5gb")
	must(t, err)
	must(t, n.Init())
	device, err := n.DeviceGetHandleByIndex(0)
	must(t, err)
	instance, err := n.DeviceGetGpuInstanceById(device, 7)
	must(t, err)
	compute, err := n.GpuInstanceGetComputeInstanceById(instance, 0)
	must(t, err)
	must(t, n.Shutdown())
	must(t, n.Init())
	_, ofDevice := n.DeviceGetUUID(device)
	_, ofInstance := n.GpuInstanceGetInfo(instance)
	_, ofCompute := n.ComputeInstanceGetInfo(compute)
	for _, err := range []error{ofDevice, ofInstance, ofCompute} {
		if !errors.Is(err, nvml.InvalidArgument) {
			t.Errorf("%v, want INVALID_ARGUMENT", err)
		}
	}
	device, err = n.DeviceGetHandleByIndex(0)
	must(t, err)
	instance, err = n.DeviceGetGpuInstanceById(device, 7)
	must(t, err)
	if _, err := n.GpuInstanceGetComputeInstanceById(instance, 0); err != nil {
		t.Error(err)
	}
}

// TestUnlistedGPUs checks which of the bound GPUs the driver lists, and that no other one can be looked up.
func TestUnlistedGPUs(t *testing.T) {
	for world, want := range map[string]int{"": 4, "unlisted=0": 4, "unlisted=1": 3, "unlisted=9": 0} {
		n := open(t, "a30x4")
		must(t, n.SetWorld(world))
		count, err := n.DeviceGetCount()
		if bound, unbound := n.Bound(); count != want || err != nil || len(bound) != 4 || unbound != nil {
			t.Errorf("%q: %d GPUs, %v, bound to %q, %v", world, count, err, bound, unbound)
		}
		if _, err := n.DeviceGetHandleByIndex(want); returned(err) != nvml.InvalidArgument {
			t.Errorf("%q: GPU %d: %v", world, want, err)
		}
		if err := n.OpenControl(); err != nil {
			t.Errorf("%q: the control node: %v", world, err)
		}
	}
	n, err := simnode.New("a30x4")
	must(t, err)
	must(t, n.SetWorld("no-nodes"))
	if err := n.Init(); returned(err) != nvml.DriverNotLoaded || n.OpenControl() == nil {
		t.Errorf("without device nodes: %v, %v", err, n.OpenControl())
	}
}
