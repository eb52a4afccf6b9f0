package dra_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// onDemand is a node whose GPUs are divided on demand.
func onDemand(t testing.TB, p sharing.Profile, gpus ...sharing.GPU) dra.Node {
	n := dra.Node{GPUs: gpus, Profile: p, OnDemand: map[string]mig.Geometry{}, Foreign: map[string][]mig.Partition{}}
	for _, gpu := range gpus {
		n.OnDemand[gpu.UUID] = h100(t)
	}
	return n
}

// TestPlacesOnDemand has every place of the offered profiles, partitions on the first GPU before the second, and
// then whole GPUs from the last one on.
func TestPlacesOnDemand(t *testing.T) {
	p := everything()
	p.DRA = sharing.DRAConfig{Resources: []string{"nvidia.com/gpu", "nvidia.com/mig-3g.40gb", "nvidia.com/small"}, DynamicMIG: true}
	p.TimeSlicing = []sharing.ReplicatedResource{{Resource: "nvidia.com/mig-2g.20gb", Replicas: 3, Rename: "nvidia.com/small"}}
	have := divided(t, hopper(0), "3g.40gb", "1g.10gb")
	have.Partitions[0].Health = sharing.Faulty("ECC")
	ill := hopper(2)
	ill.Health = sharing.Faulty("XID 79")
	n := onDemand(t, p, have, hopper(1))
	n.GPUs = append(n.GPUs, ill) // Offered unchanged.
	offer := build(t, n)
	var want []string
	want = append(want, lower(2)+" nvidia.com/gpu 80Gi fault=XID-79:NoSchedule")
	for i := range 2 {
		for _, start := range []int{4, 2, 0} {
			want = append(want, fmt.Sprintf("%s-2g20gb-%d-ts nvidia.com/small 19Gi shares=3 memory-slice-%d=1 memory-slice-%d=1 slices=2", lower(i), start, start, start+1))
		}
		for _, start := range []int{4, 0} {
			line := fmt.Sprintf("%s-3g40gb-%d nvidia.com/mig-3g.40gb 39Gi", lower(i), start)
			for slot := start; slot < start+4; slot++ {
				line += fmt.Sprintf(" memory-slice-%d=1", slot)
			}
			line += " slices=3"
			if i == 0 && start == have.Partitions[0].Placement.Start {
				line += " fault=ECC:NoSchedule"
			}
			want = append(want, line)
		}
	}
	all := " me=1 memory-slice-0=1 memory-slice-1=1 memory-slice-2=1 memory-slice-3=1 memory-slice-4=1 memory-slice-5=1 memory-slice-6=1 memory-slice-7=1 slices=7"
	want = append(want, lower(1)+" nvidia.com/gpu 80Gi"+all, lower(0)+" nvidia.com/gpu 80Gi"+all)
	same(t, "devices", want, summary(offer))
	// An existing partition has no UUID here, as it gets another one each time it is created.
	for _, d := range devicesOf(offer) {
		if uuid := *d.Attributes["uuid"].StringValue; (uuid == "") != (*d.Attributes["type"].StringValue == "mig") {
			t.Errorf("%s has the UUID %q", d.Name, uuid)
		}
	}

	// The driver's memory size of an instance counts.
	g := h100(t)
	g.Memory = map[mig.Profile]uint64{profile(t, "2g.20gb"): 19968}
	n.OnDemand[uuid(0)] = g
	if lines := summary(build(t, n)); !strings.Contains(lines[1], " 19968Mi ") {
		t.Error(lines[1])
	}
	// The GPU's fault applies to every place.
	n.GPUs[1].Health = sharing.Faulty("lost")
	faults := 0
	for _, line := range summary(build(t, n)) {
		if strings.Contains(line, "fault=lost") {
			faults++
		}
	}
	if faults != 6 {
		t.Errorf("%d devices of the lost GPU say so, want 6", faults)
	}
}

// TestMemoryIsCounted checks that the memory counter, by which quota systems count, equals the devices' memory,
// for a whole GPU at least its largest instance's, and blocks nothing.
func TestMemoryIsCounted(t *testing.T) {
	n := onDemand(t, everything(), hopper(0))
	g := h100(t)
	g.Memory = map[mig.Profile]uint64{profile(t, "1g.10gb"): 9856, profile(t, "3g.40gb"): 40448, profile(t, "7g.80gb"): 81038}
	n.OnDemand[uuid(0)] = g
	offer := build(t, n)
	supply := offer.Slices[0].Spec.SharedCounters[0].Counters["memory"].Value
	if supply.Value() < 81038<<20 || supply.Value() > 81040<<20 || supply.Format != resource.BinarySI {
		t.Errorf("the GPU has %s", supply.String())
	}
	for _, d := range devicesOf(offer) {
		takes, has := d.ConsumesCounters[0].Counters["memory"].Value, d.Capacity["memory"].Value
		if d.Name == lower(0) {
			has = supply
		}
		if takes.Cmp(has) != 0 || takes.IsZero() {
			t.Errorf("%s takes %s and has %s", d.Name, takes.String(), has.String())
		}
	}
}

// TestEnginesOnDemand checks that a place has its profile's engines from the driver, and the whole GPU the most
// that any instance has of each.
func TestEnginesOnDemand(t *testing.T) {
	n := onDemand(t, everything(), hopper(0))
	g := h100(t)
	g.Engines = map[mig.Profile]mig.Engines{
		profile(t, "1g.10gb"): {Multiprocessors: 16, CopyEngines: 1, Decoders: 1}, profile(t, "1g.10gb+me"): {Multiprocessors: 16, JPEGEngines: 1, OFAEngines: 1},
		profile(t, "7g.80gb"): {Multiprocessors: 132, CopyEngines: 8, Decoders: 7, JPEGEngines: 7},
	}
	n.OnDemand[uuid(0)] = g
	want := map[string]string{"1g.10gb": "16 1 1 0 0 0", "1g.10gb+me": "16 0 0 0 1 1", "7g.80gb": "132 8 7 0 7 0", "": "132 8 7 0 7 1"}
	for _, d := range devicesOf(build(t, n)) {
		if of := *d.Attributes["profile"].StringValue; want[of] != "" {
			same(t, d.Name, want[of], engines(t, d))
		}
	}
}

// TestWholeGPUOnDemand checks that a GPU whose MIG mode requires a reset is not offered whole.
func TestWholeGPUOnDemand(t *testing.T) {
	ampere := divided(t, hopper(0))
	ampere.Architecture = "ampere"
	names := namesOf(build(t, onDemand(t, everything(), ampere, hopper(1))))
	if len(names) != 51 || slices.Contains(names, lower(0)) || !slices.Contains(names, lower(1)) {
		t.Errorf("%d devices: %v", len(names), names)
	}
}

// TestSliceOfAGPU checks that all devices of a GPU are in one slice, so that a fault of one GPU is one write.
func TestSliceOfAGPU(t *testing.T) {
	var gpus []sharing.GPU
	for i := range 8 {
		gpus = append(gpus, divided(t, hopper(i)))
		gpus[i].Architecture = "ampere"
	}
	offer := build(t, onDemand(t, everything(), gpus...))
	var sizes []int
	of := map[string]int{}
	for i, slice := range offer.Slices {
		sizes = append(sizes, len(slice.Spec.Devices)+len(slice.Spec.SharedCounters))
		for _, d := range slice.Spec.Devices {
			gpu := *d.Attributes["parentUUID"].StringValue
			if at, known := of[gpu]; known && at != i {
				t.Errorf("%s is in the slices %d and %d", gpu, at, i)
			}
			of[gpu] = i
		}
	}
	same(t, "sizes", []int{8, 50, 50, 50, 50}, sizes)
}

// TestForeignPartitions checks that another program's partitions do not count as free, unless a claim has them
// anyway: a negative counter would stop the whole pool.
func TestForeignPartitions(t *testing.T) {
	n := onDemand(t, everything(), divided(t, hopper(0), "1g.10gb+me"))
	n.Foreign[uuid(0)] = []mig.Partition{
		{Profile: profile(t, "1g.10gb+me"), Placement: mig.Placement{Start: 6, Size: 1}},
		// Compute instances in one GPU instance are two partitions and one instance.
		{Profile: profile(t, "1c.2g.20gb"), Placement: mig.Placement{Start: 0, Size: 2}},
	}
	counters := func() string {
		var left []string
		set := build(t, n).Slices[0].Spec.SharedCounters[0]
		for _, name := range slices.Sorted(maps.Keys(set.Counters)) {
			value := set.Counters[name].Value
			left = append(left, fmt.Sprintf("%s=%s", name, value.String()))
		}
		return strings.Join(left, " ")
	}
	const left = "me=0 memory=51Gi memory-slice-0=0 memory-slice-1=0 memory-slice-2=1 memory-slice-3=1 memory-slice-4=1 memory-slice-5=1 memory-slice-6=0 memory-slice-7=1 slices=4"
	if got := counters(); got != left {
		t.Errorf("%s, want %s", got, left)
	}
	n.Foreign[uuid(0)] = append(n.Foreign[uuid(0)], n.Foreign[uuid(0)][1])
	if got := counters(); got != left {
		t.Errorf("with a second compute instance in the same GPU instance: %s, want %s", got, left)
	}
	n.Held = []string{lower(0) + "-4g40gb-0"}
	if got := counters(); got != strings.NewReplacer("slice-0=0", "slice-0=1", "slice-1=0", "slice-1=1").Replace(left) {
		t.Errorf("with a claim that has slots 0 to 3: %s", got)
	}
}

// TestOnDemandIsAsked checks which GPUs are divided on demand.
func TestOnDemandIsAsked(t *testing.T) {
	a100 := divided(t, hopper(0))
	a100.Architecture = "ampere"
	off := hopper(1)
	off.Architecture = "ampere"
	state := sharing.MIGState{GPU: sharing.GPUID{Index: 0, Device: 0x233010DE}, Geometry: h100(t)}
	dynamic := everything()
	dynamic.DRA.DynamicMIG, dynamic.MIG.Manage = true, true
	with := func(change func(*sharing.Profile)) sharing.Profile {
		p := dynamic
		change(&p)
		return p
	}
	for _, test := range []struct {
		name    string
		gpu     sharing.GPU
		state   sharing.MIGState
		profile sharing.Profile
		want    bool
		why     string
	}{
		{"hopper, mode off", hopper(0), state, dynamic, true, ""},
		{"ampere, mode on", a100, state, dynamic, true, ""},
		{"ampere, mode off", off, state, dynamic, false, "GPU 1 is offered whole"},
		{"no MIG", hopper(0), sharing.MIGState{}, dynamic, false, ""},
		{"not asked", hopper(0), state, with(func(p *sharing.Profile) { p.DRA.DynamicMIG = false }), false, ""},
		{"not managed", hopper(0), state, with(func(p *sharing.Profile) { p.MIG.Manage = false }), false, ""},
		{"a layout", hopper(0), state, with(func(p *sharing.Profile) { p.MIG.Name = "all-1g.10gb" }), false, ""},
		{"a strategy that offers no partitions by profile", hopper(0), state, with(func(p *sharing.Profile) { p.MIGStrategy = sharing.MIGSingle }), false, `MIG strategy "single"`},
	} {
		yes, why := dra.OnDemand(test.gpu, test.state, test.profile)
		if yes != test.want || !strings.Contains(why, test.why) || (why == "") != (test.why == "") {
			t.Errorf("%s: %t, %q", test.name, yes, why)
		}
	}
}

// TestHeldChangesNothing checks that no slice is written when a claim gets or returns a device. While all devices
// are offered, the scheduler keeps track.
func TestHeldChangesNothing(t *testing.T) {
	p := everything()
	p.TimeSlicing = []sharing.ReplicatedResource{{Resource: "nvidia.com/mig-3g.40gb", Replicas: 2}}
	n := onDemand(t, p, hopper(0), hopper(1))
	n.GPUs = append(n.GPUs, hopper(2), divided(t, hopper(3), "3g.40gb", "1g.10gb"))
	free := build(t, n)
	n.Held = []string{lower(0), lower(1) + "-3g40gb-4-ts", lower(1) + "-1g10gb-me-0", lower(1) + "-2g20gb-2", lower(2), lower(3) + "-3g40gb-4-ts"}
	same(t, "with holders", free, build(t, n))
	// A partition made for one of them is no news either.
	n.GPUs[1] = divided(t, n.GPUs[1], "2g.20gb", "3g.40gb")
	same(t, "with partitions made", free, build(t, n))
}
