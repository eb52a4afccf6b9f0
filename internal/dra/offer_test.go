package dra_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
)

const gibibyte = 1 << 30

func uuid(i int) string { return fmt.Sprintf("GPU-%08d-0000-4000-8000-00000000abcd", i) }

// lower is the beginning of the names of a GPU's devices.
func lower(i int) string { return strings.ToLower(uuid(i)) }

// hopper is an H100 of 80 GB.
func hopper(i int) sharing.GPU {
	return sharing.GPU{
		UUID: uuid(i), Index: i, Minor: 9 - i, PCIBusID: fmt.Sprintf("00000000:%02X:00.0", 0x3B+i), Model: "NVIDIA H100 80GB HBM3",
		Memory: 80 * gibibyte, Brand: "Nvidia", Architecture: "hopper", ComputeCapability: "9.0", NUMANode: i % 2,
	}
}

// divided is the GPU with partitions of the profiles; of "1c.2g.20gb" two in one GPU instance.
func divided(t testing.TB, gpu sharing.GPU, profiles ...string) sharing.GPU {
	t.Helper()
	layout := mig.Layout{MIG: true}
	for _, p := range profiles {
		layout.Partitions = append(layout.Partitions, mig.PartitionCount{Profile: profile(t, p), Count: 1})
	}
	placed, err := h100(t).Place(layout, nil)
	if err != nil {
		t.Fatal(err)
	}
	gpu.MIG = true
	for i, p := range placed {
		gpu.Partitions = append(gpu.Partitions, sharing.Partition{
			UUID: fmt.Sprintf("MIG-%s-%d", gpu.UUID, i), Index: i, GI: 9 - p.Placement.Start, CI: i, Profile: p.Profile, Placement: p.Placement,
			Memory: uint64(p.Placement.Size) * 10 * gibibyte,
		})
	}
	return gpu
}

func profile(t testing.TB, s string) mig.Profile {
	t.Helper()
	p, err := mig.ParseProfile(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func h100(t testing.TB) mig.Geometry {
	t.Helper()
	g, ok := mig.GeometryOf(0x2330)
	if !ok {
		t.Fatal("no geometry")
	}
	return g
}

// everything offers all resources by DRA.
func everything() sharing.Profile {
	return sharing.Profile{
		MIGStrategy: sharing.MIGMixed, Policy: sharing.Packed, GPUNames: []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
		DRA: sharing.DRAConfig{All: true},
	}
}

func build(t testing.TB, n dra.Node) dra.Offer {
	t.Helper()
	n.Name, n.Driver, n.DriverVersion, n.CUDA = "n1", dra.DriverName, "580.65.06", 12080
	if n.Plan.Health == nil {
		n.Plan = sharing.NewPlan(n.GPUs, n.Profile)
	}
	offer, err := dra.Build(n)
	if err != nil {
		t.Fatal(err)
	}
	return offer
}

func devicesOf(offer dra.Offer) (all []resourceapi.Device) {
	for _, slice := range offer.Slices {
		all = append(all, slice.Spec.Devices...)
	}
	return all
}

func namesOf(offer dra.Offer) (names []string) {
	for _, d := range devicesOf(offer) {
		names = append(names, d.Name)
	}
	return names
}

// summary has a line for each device: its name, resource, shares and memory, the counters it consumes, and its
// taints.
func summary(offer dra.Offer) (lines []string) {
	for _, d := range devicesOf(offer) {
		memory := d.Capacity["memory"].Value
		line := fmt.Sprintf("%s %s %s", d.Name, *d.Attributes["resource"].StringValue, memory.String())
		if shares, ok := d.Capacity["shares"]; ok {
			line += " shares=" + shares.Value.String()
		}
		for _, set := range d.ConsumesCounters {
			for _, name := range slices.Sorted(maps.Keys(set.Counters)) {
				if name == "memory" {
					continue // TestMemoryIsCounted has it.
				}
				n := set.Counters[name].Value
				line += fmt.Sprintf(" %s=%s", name, n.String())
			}
		}
		for _, taint := range d.Taints {
			line += fmt.Sprintf(" %s=%s:%s", strings.TrimPrefix(taint.Key, dra.DriverName+"/"), taint.Value, taint.Effect)
		}
		lines = append(lines, line)
	}
	return lines
}

func same(t *testing.T, what string, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// TestOffer has the devices of a node with whole, shared, divided and faulty GPUs.
func TestOffer(t *testing.T) {
	p := everything()
	p.TimeSlicing = []sharing.ReplicatedResource{
		{Resource: "nvidia.com/gpu", Select: sharing.Selection{Count: 1}, Replicas: 4, Rename: "nvidia.com/gpu.shared"},
		{Resource: "nvidia.com/mig-3g.40gb", Replicas: 2},
	}
	faulty := hopper(3)
	faulty.Health = sharing.Faulty("XID 79: the GPU has fallen off the bus")
	gpus := []sharing.GPU{hopper(0), hopper(1), divided(t, hopper(2), "1g.10gb", "1c.2g.20gb", "1c.2g.20gb", "3g.40gb"), faulty}
	offer := build(t, dra.Node{GPUs: gpus, Profile: p})
	same(t, "devices", []string{
		lower(1) + " nvidia.com/gpu 80Gi",
		lower(3) + " nvidia.com/gpu 80Gi fault=XID-79-the-GPU-has-fallen-off-the-bus:NoSchedule",
		lower(0) + "-ts nvidia.com/gpu.shared 80Gi shares=4",
		lower(2) + "-1c2g20gb-0-ci0 nvidia.com/mig-1c.2g.20gb 20Gi",
		lower(2) + "-1c2g20gb-0-ci1 nvidia.com/mig-1c.2g.20gb 20Gi",
		lower(2) + "-1g10gb-3 nvidia.com/mig-1g.10gb 10Gi",
		lower(2) + "-3g40gb-4-ts nvidia.com/mig-3g.40gb 40Gi shares=2",
	}, summary(offer))
	var classes []string
	for _, class := range offer.Classes {
		classes = append(classes, class.Name+" "+*class.Spec.ExtendedResourceName)
	}
	same(t, "classes", []string{
		"virgate-gpu.nvidia.com nvidia.com/gpu", "virgate-gpu.shared.nvidia.com nvidia.com/gpu.shared", "virgate-mig-1c.2g.20gb.nvidia.com nvidia.com/mig-1c.2g.20gb",
		"virgate-mig-1g.10gb.nvidia.com nvidia.com/mig-1g.10gb", "virgate-mig-3g.40gb.nvidia.com nvidia.com/mig-3g.40gb",
	}, classes)

	// Only named resources are offered; an unknown name is a warning.
	p.DRA = sharing.DRAConfig{Resources: []string{"nvidia.com/gpu.shared", "nvidia.com/mig-7g.80gb"}}
	offer = build(t, dra.Node{GPUs: gpus, Profile: p})
	same(t, "devices that are named", []string{lower(0) + "-ts"}, namesOf(offer))
	same(t, "warnings", []string{"dra.resources: nvidia.com/mig-7g.80gb: nothing on this node has this name"}, offer.Warnings)

	// The pool exists without a device, too.
	p.DRA = sharing.DRAConfig{}
	if offer = build(t, dra.Node{GPUs: gpus, Profile: p}); len(offer.Slices) != 1 || len(devicesOf(offer)) != 0 || len(offer.Warnings) != 1 {
		t.Errorf("%d slices, warnings %v", len(offer.Slices), offer.Warnings)
	}
	for _, n := range []dra.Node{{Driver: "d"}, {Name: "n"}, {Name: strings.Repeat("n", 240), Driver: "d.example.com.org"}} {
		if _, err := dra.Build(n); err == nil {
			t.Errorf("%q and %q: no error", n.Name, n.Driver)
		}
	}
}

// TestAttributes checks a device's attributes, also with little data.
func TestAttributes(t *testing.T) {
	gpus := []sharing.GPU{divided(t, hopper(0), "1g.10gb"), {UUID: uuid(1), Index: 1, NUMANode: -1, PCIBusID: "0001:0000", Model: strings.Repeat("ü", 40), ComputeCapability: "?"}}
	devices := devicesOf(build(t, dra.Node{GPUs: gpus, Profile: everything(), PCIeRoots: map[string]string{uuid(0): "pci0000:3a"}}))
	show := func(d resourceapi.Device) map[string]string {
		all := map[string]string{}
		for name, a := range d.Attributes {
			switch {
			case a.StringValue != nil:
				all[string(name)] = *a.StringValue
			case a.VersionValue != nil:
				all[string(name)] = "v" + *a.VersionValue
			default:
				all[string(name)] = fmt.Sprint(*a.IntValue)
			}
		}
		return all
	}
	same(t, "the partition's", map[string]string{
		"type": "mig", "uuid": "MIG-" + uuid(0) + "-0", "parentUUID": uuid(0), "profile": "1g.10gb", "productName": "NVIDIA H100 80GB HBM3", "brand": "Nvidia",
		"architecture": "Hopper", "cudaComputeCapability": "v9.0.0", "driverVersion": "v580.65.6", "cudaDriverVersion": "v12.8.0", "index": "0", "numaNode": "0", "resource.kubernetes.io/numaNode": "0", "addressingMode": "",
		"placement": "6:1", "resource": "nvidia.com/mig-1g.10gb", "sharing": "exclusive",
		"resource.kubernetes.io/pciBusID": "0000:3b:00.0", "resource.kubernetes.io/pcieRoot": "pci0000:3a",
	}, show(devices[1]))
	same(t, "the unknown GPU's", map[string]string{
		"type": "gpu", "uuid": uuid(1), "parentUUID": uuid(1), "profile": "", "productName": strings.Repeat("ü", 32), "brand": "",
		"architecture": "", "cudaComputeCapability": "v0.0.0", "driverVersion": "v580.65.6", "cudaDriverVersion": "v12.8.0", "index": "1", "numaNode": "-1", "addressingMode": "",
		"placement": "", "resource": "nvidia.com/gpu", "sharing": "exclusive", "resource.kubernetes.io/pciBusID": "0001:0000",
	}, show(devices[0]))
}

// TestOrder checks that partitions fill one GPU after the other, or are spread.
func TestOrder(t *testing.T) {
	for policy, want := range map[sharing.AllocationPolicy]string{sharing.Packed: "0000111", sharing.Distributed: "0101010", sharing.Spread: "0101010"} {
		p := everything()
		p.Policy = policy
		p.TimeSlicing = nil
		offer := build(t, dra.Node{Profile: p, GPUs: []sharing.GPU{divided(t, hopper(0), "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"), divided(t, hopper(1), "1g.10gb", "1g.10gb", "1g.10gb")}})
		got := ""
		for _, d := range devicesOf(offer) {
			got += fmt.Sprint(*d.Attributes["index"].IntValue)
		}
		if got != want {
			t.Errorf("%s: %s, want %s", policy, got, want)
		}
	}
}

// TestRequestPolicies checks that a request takes one share and no memory by default, and that two shares are
// refused if the profile says so.
func TestRequestPolicies(t *testing.T) {
	p := everything()
	p.TimeSlicing = []sharing.ReplicatedResource{{Resource: "nvidia.com/gpu", Replicas: 4}}
	device := devicesOf(build(t, dra.Node{GPUs: []sharing.GPU{hopper(0)}, Profile: p}))[0]
	shares, memory := device.Capacity["shares"].RequestPolicy, device.Capacity["memory"].RequestPolicy
	if shares.Default.Value() != 1 || shares.ValidRange.Min.Value() != 1 || shares.ValidRange.Step.Value() != 1 || shares.ValidRange.Max != nil || !*device.AllowMultipleAllocations {
		t.Errorf("shares: %v", shares)
	}
	if memory.Default.Value() != 0 || memory.ValidRange.Min.Value() != 0 || memory.ValidRange.Step.Value() != 1<<20 {
		t.Errorf("memory: %v", memory)
	}
	for _, set := range []func(){
		func() { p.FailRequestsGreaterThanOne = true },
		func() {
			p.FailRequestsGreaterThanOne = false
			p.TimeSlicing[0].Policy, p.TimeSlicing[0].SpreadStrict = sharing.Spread, true
		},
	} {
		set()
		shares = devicesOf(build(t, dra.Node{GPUs: []sharing.GPU{hopper(0)}, Profile: p}))[0].Capacity["shares"].RequestPolicy
		if len(shares.ValidValues) != 1 || shares.ValidValues[0].Value() != 1 || shares.ValidRange != nil {
			t.Errorf("one share only: %v", shares)
		}
	}
	// A container has one share of MPS, unless the profile lets it have several. Each has its part of
	// the memory.
	p.FailRequestsGreaterThanOne = true
	p.TimeSlicing[0].Policy, p.TimeSlicing[0].SpreadStrict, p.TimeSlicing[0].MPS = sharing.Packed, false, true
	for _, several := range []bool{false, true} {
		p.TimeSlicing[0].SeveralShares = several
		device := devicesOf(build(t, dra.Node{GPUs: []sharing.GPU{hopper(0)}, Profile: p}))[0]
		if shares := device.Capacity["shares"].RequestPolicy; device.Name != lower(0)+"-mps4" || *device.Attributes["sharing"].StringValue != "mps" || (shares.ValidRange != nil) != several {
			t.Errorf("%s, several %t: %v", device.Name, several, shares)
		}
		if m := device.Capacity["memory"]; m.Value.Value() != 80*gibibyte || m.RequestPolicy.Default.Value() != 20*gibibyte || len(m.RequestPolicy.ValidValues) != 1 || m.RequestPolicy.ValidValues[0].Value() != 20*gibibyte {
			t.Errorf("memory by MPS: %v", m)
		}
	}
	// If a GPU's memory is unknown, none can be booked.
	unknown := hopper(0)
	unknown.Memory = 0
	for _, p.TimeSlicing[0].MPS = range []bool{true, false} {
		if memory := devicesOf(build(t, dra.Node{GPUs: []sharing.GPU{unknown}, Profile: p}))[0].Capacity["memory"]; memory.RequestPolicy != nil {
			t.Errorf("memory: %v", memory)
		}
	}
}

var engineNames = []resourceapi.QualifiedName{"multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"}

// engines are the device's capacities of those names.
func engines(t *testing.T, d resourceapi.Device) string {
	t.Helper()
	var got []string
	for _, name := range engineNames {
		c, there := d.Capacity[name]
		if !there {
			t.Errorf("%s has no %s", d.Name, name)
		}
		got = append(got, c.Value.String())
	}
	return strings.Join(got, " ")
}

// TestCapacities checks that every device has the capacities of NVIDIA's driver, so that selectors by them work,
// that shares take none of them by default, and that all fit into Kubernetes's limit per device.
func TestCapacities(t *testing.T) {
	p := everything()
	p.TimeSlicing = []sharing.ReplicatedResource{{Resource: "nvidia.com/mig-3g.40gb", Replicas: 2}, {Resource: "nvidia.com/gpu", Replicas: 2, MPS: true}}
	gpu := divided(t, hopper(0), "1g.10gb", "3g.40gb")
	for i, multiprocessors := range []int{16, 60} {
		gpu.Partitions[i].Attributes = sharing.PartitionAttributes{
			Multiprocessors: multiprocessors, CopyEngines: 3, Decoders: 2, Encoders: 0, JPEGEngines: 4, OFAEngines: 1,
		}
	}
	gone := []string{lower(0) + "-2g20gb-0", lower(7)}
	offer := build(t, dra.Node{GPUs: []sharing.GPU{gpu, hopper(1)}, Profile: p, Held: gone, PCIeRoots: map[string]string{uuid(0): "pci0000:3a"}})
	want := map[string]string{"1g.10gb": "16 3 2 0 4 1", "3g.40gb": "60 3 2 0 4 1", "": "0 0 0 0 0 0"}
	for _, d := range devicesOf(offer) {
		for _, name := range engineNames {
			c := d.Capacity[name]
			switch shared, policy := d.AllowMultipleAllocations != nil, c.RequestPolicy; {
			case shared != (policy != nil):
				t.Errorf("%s of %s has the policy %v", name, d.Name, policy)
			case shared && (policy.Default.Value() != 0 || (policy.ValidRange == nil) != c.Value.IsZero()):
				t.Errorf("%s of %s: a share takes %v", name, d.Name, policy)
			}
		}
		same(t, d.Name, want[*d.Attributes["profile"].StringValue], engines(t, d))
		if n := len(d.Attributes) + len(d.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
			t.Errorf("%s has %d attributes and capacities", d.Name, n)
		}
	}
	if n := len(devicesOf(offer)); n != 5 {
		t.Errorf("%d devices, want 5", n)
	}
}

// TestLeaving has devices that claims hold, but that are no longer planned like that.
func TestLeaving(t *testing.T) {
	p := everything()
	p.TimeSlicing = []sharing.ReplicatedResource{{Resource: "nvidia.com/gpu", Select: sharing.Selection{List: []sharing.Selector{selector(t, "0")}}, Replicas: 4}}
	n := dra.Node{Profile: p, GPUs: []sharing.GPU{hopper(0), hopper(1), divided(t, hopper(2), "3g.40gb", "3g.40gb")}}
	n.Held = []string{
		lower(0),                // was exclusive and is shared
		lower(2) + "-2g20gb-0",  // its partition is gone
		lower(7) + "-ts",        // its GPU is gone
		lower(1) + "-mps4",      // is alone now
		lower(7) + "-mps10",     // its GPU is gone
		lower(2) + "-3g40gb-0",  // is as it was
		"no device/of anybody!", // cannot be listed at all
	}
	offer := build(t, n)
	same(t, "devices", []string{
		lower(0) + "-ts nvidia.com/gpu 80Gi shares=4 units=1",
		lower(1) + " nvidia.com/gpu 80Gi units=1",
		lower(2) + "-3g40gb-0 nvidia.com/mig-3g.40gb 40Gi units=1",
		lower(2) + "-3g40gb-4 nvidia.com/mig-3g.40gb 40Gi units=1",
		lower(0) + "  80Gi units=1 leaving=:NoSchedule",
		lower(1) + "-mps4  80Gi shares=1 units=1 leaving=:NoSchedule",
		lower(2) + "-2g20gb-0  0 units=2 leaving=:NoSchedule",
		lower(7) + "-mps10  0 shares=1 leaving=:NoSchedule",
		lower(7) + "-ts  0 shares=1 leaving=:NoSchedule",
	}, summary(offer))
	var sets []string
	for _, set := range offer.Slices[0].Spec.SharedCounters {
		n := set.Counters["units"].Value
		sets = append(sets, set.Name+" "+n.String())
	}
	// Both units of GPU 2, and the counters of the partition that stays.
	same(t, "counters", []string{lower(0) + " 1", lower(1) + " 1", lower(2) + " 3"}, sets)

	// Without a resource, no claim must be kept off the GPU.
	n.Profile.DRA = sharing.DRAConfig{Resources: []string{"nvidia.com/other"}}
	if offer = build(t, n); offer.Slices[0].Spec.SharedCounters != nil || len(devicesOf(offer)) != 6 {
		t.Errorf("%v", summary(offer))
	}
}

func selector(t testing.TB, s string) sharing.Selector {
	t.Helper()
	found, err := sharing.ParseSelector(s)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestNames checks that names are valid and unique for every profile and place of every known GPU, shared or not.
func TestNames(t *testing.T) {
	for _, g := range mig.KnownGeometries() {
		seen := map[string]bool{}
		for _, at := range g.Placements() {
			for compute := 1; compute <= at.Profile.Slices; compute++ {
				for _, unit := range []sharing.Unit{{}, {Replicas: 2}, {Replicas: 2, MPS: sharing.MPS{Shares: 2}}, {Replicas: 48, MPS: sharing.MPS{Shares: 48}}} {
					p := sharing.Partition{Profile: at.Profile, Placement: at.Placement, CI: 6}
					p.Profile.Compute = compute
					name := dra.DeviceName(uuid(0), &p, unit)
					if len(name) > 63 || seen[name] || dra.UnitNameOf(name) != dra.UnitName(uuid(0), &p) || dra.ModeOf(name) != unit.Mode() {
						t.Errorf("%s of %v: %q", p.Profile, at.Placement, name)
					}
					seen[name] = true
				}
			}
		}
	}
	unplaced := sharing.Partition{Profile: profile(t, "1g.10gb"), GI: 11}
	long := sharing.Partition{Profile: profile(t, "1c.2g.1000gb+gfx,me.all"), Placement: mig.Placement{Start: 2, Size: 2}, CI: 1}
	same(t, "names", []string{lower(0) + "-1g10gb-gi11", lower(0) + "-x9efb2b2f-2-ci1-ts"}, []string{dra.DeviceName(uuid(0), &unplaced, sharing.Unit{}), dra.DeviceName(uuid(0), &long, sharing.Unit{Replicas: 2})})
}

// TestClassNames checks that resources have different class names.
func TestClassNames(t *testing.T) {
	names := map[string]bool{}
	for _, name := range []string{"nvidia.com/a_b", "nvidia.com/a-b", "nvidia.com/A-b", "nvidia.com/a.b", "example.com/a.b", "nvidia.com/a--b", "nvidia.com/a-.b"} {
		class := dra.Class(dra.DriverName, name)
		if names[class.Name] || !strings.HasPrefix(class.Name, "virgate-") || strings.ContainsAny(class.Name, "_AB") || strings.Contains(class.Name, "-.") {
			t.Errorf("%s: %s", name, class.Name)
		}
		names[class.Name] = true
	}
}

// TestProperties checks the invariants of any node; see check.
func TestProperties(t *testing.T) {
	for seed := range uint64(repeat.Times(50, 200)) {
		n := randomNode(t, rand.New(rand.NewPCG(seed, 1)))
		offer := build(t, n)
		if problem := check(n, offer); problem != "" {
			t.Fatalf("seed %d: %s", seed, problem)
		}
		// Held devices stay unchanged when a quarter of the node changes at random.
		r := rand.New(rand.NewPCG(seed, 2))
		for _, name := range namesOf(offer) {
			if r.IntN(4) == 0 {
				n.Held = append(n.Held, name)
			}
		}
		other := randomNode(t, rand.New(rand.NewPCG(seed, 3)))
		other.Held = n.Held
		for _, next := range []dra.Node{n, other} {
			offer := build(t, next)
			if problem := check(next, offer); problem != "" {
				t.Fatalf("seed %d, with holders: %s", seed, problem)
			}
			r.Shuffle(len(next.GPUs), func(i, j int) { next.GPUs[i], next.GPUs[j] = next.GPUs[j], next.GPUs[i] })
			r.Shuffle(len(next.Held), func(i, j int) { next.Held[i], next.Held[j] = next.Held[j], next.Held[i] })
			if !reflect.DeepEqual(offer, build(t, next)) {
				t.Fatalf("seed %d: another order of GPUs and holders changes something", seed)
			}
		}
	}
}

func randomNode(t testing.TB, r *rand.Rand) dra.Node {
	p := everything()
	p.Policy = sharing.AllocationPolicies()[r.IntN(3)]
	p.FailRequestsGreaterThanOne = r.IntN(4) == 0
	p.DRA.DynamicMIG, p.MIG.Manage = true, true
	if r.IntN(3) == 0 {
		p.DRA = sharing.DRAConfig{Resources: []string{"nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/shared"}}
	}
	for _, name := range []string{"nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"} {
		if r.IntN(2) == 0 {
			p.TimeSlicing = append(p.TimeSlicing, sharing.ReplicatedResource{Resource: name, Replicas: 1 + r.IntN(5), Rename: []string{"", "nvidia.com/shared"}[r.IntN(2)], MPS: r.IntN(2) == 0, SeveralShares: r.IntN(2) == 0})
		}
	}
	n := dra.Node{Profile: p, OnDemand: map[string]mig.Geometry{}, Foreign: map[string][]mig.Partition{}}
	layouts := [][]string{nil, {"1g.10gb", "3g.40gb"}, {"7g.80gb"}, {"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"}, {"1c.3g.40gb", "1c.3g.40gb", "4g.40gb"}, {"1g.10gb+me", "2g.20gb"}}
	for i := range r.IntN(12) {
		gpu := hopper(i)
		if layout := layouts[r.IntN(len(layouts))]; layout != nil {
			gpu = divided(t, gpu, layout...)
		}
		if r.IntN(3) == 0 {
			gpu.Architecture = "ampere"
		}
		if r.IntN(8) == 0 {
			gpu.Health = sharing.Faulty("XID 48")
		}
		if r.IntN(3) == 0 {
			n.OnDemand[gpu.UUID] = h100(t)
			for _, part := range gpu.Partitions {
				if r.IntN(3) == 0 {
					n.Foreign[gpu.UUID] = append(n.Foreign[gpu.UUID], mig.Partition{Profile: part.Profile, Placement: part.Placement})
				}
			}
		}
		n.GPUs = append(n.GPUs, gpu)
	}
	return n
}

// check returns a violation: of the API's limits, names, the pool's numbers, negative or missing counters, held
// devices that are not listed, or hardware that could be allocated while a claim has it under another name.
func check(n dra.Node, offer dra.Offer) string {
	supply, sets, seen := map[string]int64{}, map[string]bool{}, map[string]resourceapi.Device{}
	for i, slice := range offer.Slices {
		spec := slice.Spec
		switch {
		case spec.Pool != resourceapi.ResourcePool{Name: "n1/" + dra.DriverName, Generation: 1, ResourceSliceCount: int64(len(offer.Slices))}:
			return fmt.Sprintf("pool %v of %d slices", spec.Pool, len(offer.Slices))
		case i > 0 && offer.Slices[i-1].Name >= slice.Name:
			return "names are not in order"
		case len(spec.Devices) > 64 || len(spec.SharedCounters) > 8 || spec.Devices != nil && spec.SharedCounters != nil:
			return fmt.Sprintf("slice %d has %d devices and %d counter sets", i, len(spec.Devices), len(spec.SharedCounters))
		case len(offer.Slices) > 1 && len(spec.Devices)+len(spec.SharedCounters) == 0:
			return fmt.Sprintf("slice %d is empty", i)
		}
		for _, set := range spec.SharedCounters {
			if len(set.Counters) == 0 || len(set.Counters) > 32 || sets[set.Name] {
				return fmt.Sprintf("set %s has %d counters, or is there twice", set.Name, len(set.Counters))
			}
			sets[set.Name] = true
			for name, counter := range set.Counters {
				supply[set.Name+"/"+name] = counter.Value.Value()
			}
		}
		for _, d := range spec.Devices {
			if _, twice := seen[d.Name]; twice || len(d.Name) > 63 || len(d.Attributes)+len(d.Capacity) > 32 {
				return fmt.Sprintf("%s is there twice, or has a long name or %d attributes", d.Name, len(d.Attributes))
			}
			seen[d.Name] = d
		}
	}
	left := maps.Clone(supply)
	for _, name := range n.Held {
		d, listed := seen[name]
		if !listed {
			return name + " is held and not listed"
		}
		for _, set := range d.ConsumesCounters {
			for counter, c := range set.Counters {
				left[set.CounterSet+"/"+counter] -= c.Value.Value()
			}
		}
		delete(seen, name)
	}
	for name, n := range left {
		if n < 0 {
			return fmt.Sprintf("%s is %d", name, n)
		}
	}
	for _, d := range seen {
		free := true
		for _, set := range d.ConsumesCounters {
			for counter, c := range set.Counters {
				if value, known := left[set.CounterSet+"/"+counter]; !known {
					return d.Name + " takes of a counter that is not there"
				} else if value < c.Value.Value() {
					free = false
				}
			}
		}
		for _, held := range n.Held {
			if free && conflict(d.Name, held) {
				return fmt.Sprintf("%s could be given beside %s", d.Name, held)
			}
		}
	}
	return ""
}

// conflict reports whether two devices use the same hardware: one is the whole GPU, or their places overlap.
func conflict(a, b string) bool {
	const gpu = len("gpu-00000000-0000-4000-8000-00000000abcd")
	if a[:gpu] != b[:gpu] {
		return false
	}
	from, to, partA := slots(a[gpu:])
	start, end, partB := slots(b[gpu:])
	if strings.Contains(a, "-ci") && strings.Contains(b, "-ci") {
		return dra.UnitNameOf(a) == dra.UnitNameOf(b)
	}
	return !partA || !partB || from < end && start < to
}

func slots(name string) (from, to int, partition bool) {
	var compute, instance, memory int
	name = strings.ReplaceAll(name, "-me-", "-")
	if _, err := fmt.Sscanf(name, "-%dc%dg%dgb-%d", &compute, &instance, &memory, &from); err != nil {
		if _, err := fmt.Sscanf(name, "-%dg%dgb-%d", &instance, &memory, &from); err != nil {
			return 0, 0, false
		}
	}
	return from, from + memory/10, true
}
