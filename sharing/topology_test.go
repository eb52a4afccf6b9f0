package sharing

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestPairScore(t *testing.T) {
	for _, test := range []struct {
		name        string
		there, back Link
		a, b        int // NUMA nodes
		want        int
	}{
		{"nothing known", Link{}, Link{}, -1, -1, 0},
		{"one NUMA node", Link{}, Link{}, 3, 3, 20},
		{"two NUMA nodes", Link{}, Link{}, 0, 1, 10},
		{"NUMA node of one", Link{}, Link{}, 0, -1, 0},
		{"NUMA node of the other", Link{}, Link{}, -1, 0, 0},
		{"one GPU", Link{Level: "internal"}, Link{Level: "internal"}, 0, 0, 60},
		{"one switch", Link{Level: "single"}, Link{Level: "single"}, 0, 0, 50},
		{"several switches", Link{Level: "multiple"}, Link{Level: "multiple"}, 0, 0, 40},
		{"one host bridge", Link{Level: "hostbridge"}, Link{Level: "hostbridge"}, 0, 0, 30},
		{"one processor", Link{Level: "node"}, Link{Level: "node"}, 0, 0, 20},
		{"two processors", Link{Level: "system"}, Link{Level: "system"}, 0, 0, 10},
		{"an unknown level", Link{Level: "galaxy"}, Link{}, 0, 0, 20},
		{"a level that is known one way", Link{}, Link{Level: "single"}, 0, 1, 50},
		{"a level that is known the other way", Link{Level: "single"}, Link{}, 0, 1, 50},
		{"NVLinks with a level", Link{NVLinks: 4, Level: "system"}, Link{NVLinks: 4, Level: "system"}, 0, 0, 410},
		{"NVLinks with NUMA nodes", Link{NVLinks: 18}, Link{NVLinks: 18}, 0, 0, 1820},
		{"NVLinks that are known one way", Link{}, Link{NVLinks: 2, Level: "node"}, 0, 0, 220},
		{"NVLinks that are known the other way", Link{NVLinks: 2, Level: "node"}, Link{}, 0, 0, 220},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, b, c := whole(0, a100), whole(1, a100), whole(2, a100)
			test.there.Peer, test.back.Peer = b.UUID, a.UUID
			units := []*Unit{
				{ID: a.UUID, GPU: a.UUID, NUMANode: test.a, Links: []Link{test.there}},
				{ID: b.UUID, GPU: b.UUID, NUMANode: test.b, Links: []Link{test.back}},
				{ID: c.UUID, GPU: c.UUID, NUMANode: -1, Links: []Link{{Peer: a.UUID, NVLinks: 99}, {Peer: "GPU-of-another-resource", NVLinks: 7}}},
			}
			n := newTopology(units)
			if got := n.score(0, 1); got != test.want || n.score(1, 0) != got {
				t.Errorf("score = %d and %d, want %d", got, n.score(1, 0), test.want)
			}
			if n.score(1, 2) != 0 || n.score(2, 0) != 9900 || n.score(1, 1) != 0 {
				t.Errorf("other scores are %d, %d and %d", n.score(1, 2), n.score(2, 0), n.score(1, 1))
			}
		})
	}
}

// If links make no difference, none are kept.
func TestNewNearnessOfEquals(t *testing.T) {
	for _, test := range []struct {
		name  string
		nodes []int
		known bool
	}{
		{"no GPU", nil, false},
		{"one GPU", []int{0}, false},
		{"two GPUs", []int{0, 1}, false},
		{"one NUMA node", []int{1, 1, 1, 1}, false},
		{"no NUMA node", []int{-1, -1, -1}, false},
		{"each its own", []int{0, 1, 2}, false},
		{"one apart", []int{0, 0, 1}, true},
		{"the last apart", []int{0, 0, 0, 0, 0, 1}, true},
		{"as many as there may be", append(slices.Repeat([]int{0}, maxTopologyGPUs-1), 1), true},
		{"too many", append(slices.Repeat([]int{0}, maxTopologyGPUs), 1), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			var gpus []*Unit
			for i, node := range test.nodes {
				id := fmt.Sprint("GPU-", i)
				gpus = append(gpus, &Unit{ID: id, GPU: id, NUMANode: node})
			}
			if got := newTopology(gpus) != nil; got != test.known {
				t.Errorf("nearness is known: %v, want %v", got, test.known)
			}
		})
	}
}

// Links reach the units that are whole GPUs, and no other.
func TestPlanLinks(t *testing.T) {
	gpus := fabricOf("DGX-1 V100").node()
	cut := cut(8, oneG())
	cut.Links = []Link{{Peer: gpus[0].UUID, NVLinks: 12}}
	plan := NewPlan(append(gpus, cut), defaults())
	for _, resource := range plan.Resources {
		for _, unit := range resource.Units {
			if want := map[bool]int{true: 0, false: 7}[unit.Partition()]; len(unit.Links) != want {
				t.Errorf("%s has %d links, want %d", unit.Index, len(unit.Links), want)
			}
		}
	}
	if len(plan.Resources) != 2 {
		t.Errorf("%d resources, want whole GPUs and partitions", len(plan.Resources))
	}
}

// A choice by links applies to whole GPUs that are not shared.
func TestPreferByLinksOnlyWholeGPUs(t *testing.T) {
	gpus := fabricOf("8 × H100 NVL").node()[:4]
	id := func(gpu int) string { return gpus[gpu].UUID }
	unhealthy := gpus[0]
	unhealthy.Health = Faulty("XID 79")
	one := gpus[3]
	one.MIG = true
	one.Partitions = []Partition{{UUID: "MIG-1", Profile: threeG()}, {UUID: "MIG-2", Index: 1, Profile: threeG()}}
	single := defaults()
	single.MIGNames = []NamingRule{{"*", "nvidia.com/gpu"}}
	for _, test := range []struct {
		name            string
		gpus            []GPU
		profile         Profile
		available, must []string
		want            []string
	}{
		{"whole GPUs", gpus, defaults(), []string{id(1), id(2), id(3)}, nil, []string{id(2), id(3)}},
		{"policy makes no difference", gpus, Profile{GPUNames: defaults().GPUNames, Policy: Packed},
			[]string{id(1), id(2), id(3)}, nil, []string{id(2), id(3)}},
		{"one is shared and free", gpus, defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2, Select: list(t, "0")}),
			[]string{id(0) + "::0", id(1), id(2), id(3)}, nil, []string{id(1), id(2)}},
		{"one is shared and not free", gpus, defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2, Select: list(t, "0")}),
			[]string{id(1), id(2), id(3)}, nil, []string{id(2), id(3)}},
		{"the container has a shared one", gpus, defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2, Select: list(t, "0")}),
			[]string{id(1), id(2), id(3)}, []string{id(0) + "::1"}, []string{id(0) + "::1", id(1)}},
		{"one is in partitions and free", []GPU{gpus[0], gpus[1], gpus[2], one}, single,
			[]string{id(1), id(2), "MIG-2"}, nil, []string{id(1), id(2)}},
		{"too few that are healthy", []GPU{unhealthy, gpus[1], gpus[2], gpus[3]}, defaults(),
			[]string{id(0), id(3)}, nil, []string{id(3), id(0)}},
		{"no need for more", gpus, defaults(), []string{id(1), id(2), id(3)}, []string{id(3), id(1)}, []string{id(1), id(3)}},
		{"an unknown one", gpus, defaults(), []string{id(1), id(2), id(3), "X"}, nil, []string{id(2), id(3)}},
		{"the container has an unknown one", gpus, defaults(), []string{id(1), id(2), id(3)}, []string{"X"}, []string{"X", id(1)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			resource := NewPlan(test.gpus, test.profile).Resources[0]
			got := NewDeviceSet(resource.Devices, resource.Units, resource.Policy).Prefer(test.available, test.must, 2)
			if !slices.Equal(got, test.want) {
				t.Errorf("Prefer = %q, want %q", got, test.want)
			}
		})
	}
}

// A unit with a replica in the list is not a GPU alone, even if it is the
// only device left of it.
func TestDeviceSetRanksOnlyExclusiveUnits(t *testing.T) {
	var hardware []Unit
	for _, id := range []string{"A", "B", "C", "D"} {
		hardware = append(hardware, Unit{ID: id, GPU: id, NUMANode: -1})
	}
	hardware[1].Links = []Link{{Peer: "D", NVLinks: 2}}
	for _, test := range []struct {
		name string
		// ofA are the devices of unit A, the first of them available.
		ofA, want []string
	}{
		{"alone", []string{"A"}, []string{"B", "D"}},
		{"a replica", []string{"A::0"}, []string{"A::0", "B"}},
		{"a replica beside it", []string{"A", "A::0"}, []string{"B", "C"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var devices []Device
			for _, id := range test.ofA {
				devices = append(devices, Device{ID: id, Unit: "A", Healthy: true})
			}
			devices = append(devices, units(t, "B×1 C×1 D×1")...)
			got := NewDeviceSet(devices, hardware, Distributed).Prefer([]string{test.ofA[0], "B", "C", "D"}, nil, 2)
			if !slices.Equal(got, test.want) {
				t.Errorf("Prefer = %q, want %q", got, test.want)
			}
		})
	}
}

// randomNearness has few scores, so that many sets are equally good.
func randomNearness(r *rand.Rand, places int) *topology {
	n := &topology{gpus: places, scores: make([]int, places*places)}
	for a := range places {
		for b := range a {
			score := 10 * r.IntN(4)
			n.scores[a*places+b], n.scores[b*places+a] = score, score
		}
	}
	return n
}

// within is the sum of the scores over the pairs of the places.
func (n *topology) within(places []int) int {
	sum := 0
	for i, a := range places {
		for _, b := range places[:i] {
			sum += n.score(a, b)
		}
	}
	return sum
}

// without removes others from all.
func without[T comparable](all, others []T) []T {
	return slices.DeleteFunc(slices.Clone(all), func(one T) bool { return slices.Contains(others, one) })
}

// everySet calls visit with each set of so many, first ones first.
func everySet[T any](all []T, wanted int, sofar []T, visit func([]T)) {
	if wanted == 0 {
		visit(sofar)
		return
	}
	for i := range all {
		everySet(all[i+1:], wanted-1, append(slices.Clone(sofar), all[i]), visit)
	}
}

func TestNearestIsTheFirstBestSet(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 500 {
		n := randomNearness(r, 2+r.IntN(8))
		places := r.Perm(n.gpus)
		own := places[:r.IntN(n.gpus)]
		free := without(places, own)
		slices.Sort(free)
		wanted := 1 + r.IntN(len(free))

		var want []int
		var best [2]int
		everySet(free, wanted, nil, func(set []int) {
			setScore := [2]int{n.within(slices.Concat(own, set)), n.within(without(free, set))}
			if want == nil || slices.Compare(setScore[:], best[:]) > 0 {
				want, best = set, setScore
			}
		})
		if got := n.bestSet(free, own, wanted); !slices.Equal(got, want) {
			t.Fatalf("%d of %v with %v by %+v: %v, want %v", wanted, free, own, n, got, want)
		}
	}
}

// With too many sets to compare, the answer still finds clear groups, and is never worse than the list's order.
func TestNearestAmongMany(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for _, places := range []int{20, 33, maxTopologyGPUs} {
		n := randomNearness(r, places)
		free := make([]int, places)
		for i := range free {
			free[i] = i
		}
		group := free[places-10 : places-1]
		for _, a := range group {
			for _, b := range group {
				if a != b {
					n.scores[a*places+b] = 100
				}
			}
		}
		if got := n.bestSet(free, nil, len(group)); !slices.Equal(got, group) {
			t.Errorf("%d of %d GPUs: %v, want %v", len(group), places, got, group)
		}
		if got := n.bestSet(without(free, group[:2]), group[:2], len(group)-2); !slices.Equal(got, group[2:]) {
			t.Errorf("%d of %d GPUs with 2: %v, want %v", len(group)-2, places, got, group[2:])
		}
		for wanted := 6; wanted < places-6; wanted++ {
			got := n.bestSet(free, nil, wanted)
			if len(slices.Compact(slices.Clone(got))) != wanted || !slices.IsSorted(got) {
				t.Fatalf("%d of %d GPUs: %v", wanted, places, got)
			}
			if mine, listed := n.within(got), n.within(free[:wanted]); mine < listed {
				t.Errorf("%d of %d GPUs: %v has %d, the first ones have %d", wanted, places, got, mine, listed)
			}
		}
	}
}

// Of two equally good groups, the one that is used up goes first.
func TestNearestAmongManyLeavesGroupsWhole(t *testing.T) {
	const places = 20
	n := &topology{gpus: places, scores: make([]int, places*places)}
	var free []int
	for a := range places {
		free = append(free, a)
		for b := range a {
			if a < 8 || a < 15 && b >= 8 {
				n.scores[a*places+b], n.scores[b*places+a] = 100, 100
			}
		}
	}
	want := free[8:15]
	if got := n.bestSet(free, nil, len(want)); !slices.Equal(got, want) {
		t.Errorf("%d of groups 0-7 and 8-14: %v", len(want), got)
	}
}

func TestSetsUpTo(t *testing.T) {
	for _, test := range []struct {
		n, k int
		want bool
	}{
		{8, 4, true}, {16, 8, true}, {16, 1, true}, {16, 16, true}, {17, 8, false}, {17, 6, true}, {17, 7, false},
		{17, 11, true}, {17, 10, false}, {64, 1, true}, {64, 2, true}, {64, 3, false}, {43, 3, true}, {44, 3, false},
		{64, 62, true}, {64, 32, false}, {1, 1, true},
	} {
		if got := combinationsWithin(test.n, test.k, maxComparedSets); got != test.want {
			t.Errorf("combinationsWithin(%d, %d) = %v", test.n, test.k, got)
		}
	}
}

// fabric is how the GPUs of a kind of node are linked.
type fabric struct {
	name string
	gpus int
	// nvlinks and level are those between GPUs a and b, a < b.
	nvlinks func(a, b int) int
	level   func(a, b int) string
}

// fabrics are nodes whose links are published: the DGX-1 and RTX 8000 ones as
// NVIDIA's own tests have them (go-gpuallocator, gpuallocator/common_test.go),
// the others after the user guides of the DGX systems and the data sheets of the
// GPUs, with simple PCIe trees. NVLinks through switches are the same between
// all GPUs.
func fabrics() []fabric {
	return []fabric{
		{"DGX-1 P100", 8, cube(""), quads(2, "single", "hostbridge")},
		{"DGX-1 V100", 8, cube("03 04 12 15 23 47 56 67"), quads(1, "single", "hostbridge")},
		{"4 × Quadro RTX 8000", 4, bridges("03 12", 2), pairs("node")},
		{"DGX-2", 16, switched(6), tree("single", "multiple", "node")},
		{"DGX A100", 8, switched(12), tree("multiple", "node", "system")},
		{"DGX H100", 8, switched(18), tree("node", "node", "system")},
		{"8 × H100 NVL", 8, bridges("01 23 45 67", 12), tree("node", "node", "system")},
		{"8 × L40S", 8, switched(0), tree("single", "node", "system")},
	}
}

// fabricOf returns the fabric of that name.
func fabricOf(name string) fabric {
	for _, f := range fabrics() {
		if f.name == name {
			return f
		}
	}
	panic("no fabric " + name)
}

// cube is the hybrid cube mesh: two groups of four, each GPU linked to its
// group and to its counterpart in the other one, by one NVLink or, for the pairs
// in the text, by two.
func cube(double string) func(a, b int) int {
	return func(a, b int) int {
		switch {
		case strings.Contains(double, fmt.Sprintf("%d%d", a, b)):
			return 2
		case a/4 == b/4 || b-a == 4:
			return 1
		}
		return 0
	}
}

// bridges are NVLinks between the pairs in the text.
func bridges(text string, count int) func(a, b int) int {
	return func(a, b int) int {
		if strings.Contains(text, fmt.Sprintf("%d%d", a, b)) {
			return count
		}
		return 0
	}
}

// switched are NVLinks between all GPUs.
func switched(count int) func(a, b int) int { return func(int, int) int { return count } }

// quads are two groups of four; GPUs apart by distance are near in a group.
func quads(distance int, near, group string) func(a, b int) string {
	return func(a, b int) string {
		switch {
		case a/4 != b/4:
			return "system"
		case a/distance/2 == b/distance/2 && b-a == distance:
			return near
		}
		return group
	}
}

// pairs are groups of two.
func pairs(near string) func(a, b int) string {
	return func(a, b int) string {
		if a/2 == b/2 {
			return near
		}
		return "system"
	}
}

// tree are levels within groups of two, four and eight.
func tree(two, four, eight string) func(a, b int) string {
	return func(a, b int) string {
		switch {
		case a/2 == b/2:
			return two
		case a/4 == b/4:
			return four
		case a/8 == b/8:
			return eight
		}
		return "system"
	}
}

// node returns the fabric's GPUs.
func (f fabric) node() []GPU {
	gpus := node(f.gpus)
	for b := range gpus {
		for a := range b {
			link := Link{NVLinks: f.nvlinks(a, b), Level: f.level(a, b)}
			link.Peer = gpus[b].UUID
			gpus[a].Links = append(gpus[a].Links, link)
			link.Peer = gpus[a].UUID
			gpus[b].Links = append(gpus[b].Links, link)
		}
	}
	return gpus
}

// score is the pair's score in NVIDIA's best-effort policy.
func (f fabric) score(a, b int) int {
	places := map[string]int{"system": 10, "node": 20, "hostbridge": 30, "multiple": 40, "single": 50, "internal": 60}
	return 100*f.nvlinks(min(a, b), max(a, b)) + places[f.level(min(a, b), max(a, b))]
}

// gpusMask is a set of GPUs by index.
type gpusMask uint

func (m gpusMask) size() int { return bits.OnesCount(uint(m)) }

// sums returns the sum of the scores within each set of the fabric's GPUs.
func (f fabric) sums() []int {
	sums := make([]int, 1<<f.gpus)
	for m := range sums[1:] {
		set := gpusMask(m + 1)
		last := bits.Len(uint(set)) - 1
		rest := set &^ (1 << last)
		sums[set] = sums[rest]
		for a := range last {
			if rest&(1<<a) != 0 {
				sums[set] += f.score(a, last)
			}
		}
	}
	return sums
}

// prefer asks an index of the fabric's GPUs.
func (f fabric) prefer(x *DeviceSet, resource Resource, available, must gpusMask, size int) gpusMask {
	ids := func(m gpusMask) []string {
		var all []string
		for at, device := range resource.Devices {
			if m&(1<<at) != 0 {
				all = append(all, device.ID)
			}
		}
		return all
	}
	var set gpusMask
	for _, id := range x.Prefer(ids(available), ids(must), size) {
		set |= 1 << x.position[id]
	}
	return set
}

// check compares the answer with all other sets: none has a higher score by NVIDIA's plugin, so that plugin's
// choice is not better, and of those with the same score, none leaves a better rest.
func (f fabric) check(t *testing.T, sums []int, x *DeviceSet, resource Resource, available, must gpusMask, size int) {
	t.Helper()
	got := f.prefer(x, resource, available, must, size)
	if got.size() != size || got&^available != 0 || got&must != must {
		t.Fatalf("%d of %016b with %016b: got %016b", size, available, must, got)
	}
	for other := available; other > 0; other = (other - 1) & available {
		if other.size() != size || other&must != must {
			continue
		}
		left, otherLeft := sums[available&^got], sums[available&^other]
		if sums[other] > sums[got] || sums[other] == sums[got] && otherLeft > left {
			t.Fatalf("%d of %016b with %016b: got %016b, which has %d and leaves %d, but %016b has %d and leaves %d",
				size, available, must, got, sums[got], left, other, sums[other], otherLeft)
		}
	}
}

// Every question about nodes with up to 8 GPUs, and some about larger ones.
func TestPreferIsAsGoodAsTheBestSet(t *testing.T) {
	for _, f := range fabrics() {
		t.Run(f.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(5, 6))
			resource := NewPlan(f.node(), defaults()).Resources[0]
			x := NewDeviceSet(resource.Devices, resource.Units, resource.Policy)
			sums := f.sums()
			all := gpusMask(len(sums) - 1)
			questions := make([]gpusMask, 0, len(sums))
			for m := range sums[1:] {
				questions = append(questions, gpusMask(m+1))
			}
			if f.gpus > 8 {
				questions = []gpusMask{all}
				for range 12 {
					questions = append(questions, gpusMask(r.Uint64())&all)
				}
			}
			for _, available := range questions {
				for size := 1; size <= available.size(); size++ {
					f.check(t, sums, x, resource, available, 0, size)
					must := available & gpusMask(r.Uint64()) & gpusMask(r.Uint64())
					if must.size() <= size {
						f.check(t, sums, x, resource, available, must, size)
					}
				}
			}
		})
	}
}

// The examples of docs/explanation/placement.md, and others by hand.
func TestPreferByLinks(t *testing.T) {
	for _, test := range []struct {
		fabric    string
		available string
		must      string
		size      int
		want      string
	}{
		{"DGX-1 V100", "0 1 2 3 4 5 6 7", "", 2, "2 3"},
		{"DGX-1 V100", "0 1 3 4 5 7", "", 2, "0 3"},
		{"DGX-1 V100", "0 1 2 3 4 5 6 7", "", 4, "0 1 2 3"},
		{"DGX-1 V100", "0 1 2 3 4 5 6 7", "4", 2, "4 7"},
		{"DGX-1 P100", "1 3 4 5 6 7", "", 4, "4 5 6 7"},
		{"4 × Quadro RTX 8000", "0 1 2 3", "", 2, "0 3"},
		{"8 × H100 NVL", "0 1 2 3 4 5 7", "", 1, "7"},
		{"8 × H100 NVL", "1 2 3 4 5 6 7", "", 3, "1 2 3"},
		{"8 × H100 NVL", "0 1 2 4 5 6 7", "2", 3, "0 1 2"},
		{"DGX H100", "1 2 3 4 5 6 7", "", 1, "1"},
		{"DGX H100", "0 4 5 6 7", "", 3, "4 5 6"},
		{"DGX H100", "2 3 4 5 6 7", "", 2, "2 3"},
		{"DGX-2", "1 3 5 8 9 13", "", 2, "8 9"},
		{"8 × L40S", "0 2 3 5 7", "", 1, "5"},
	} {
		name := fmt.Sprintf("%s: %d of %s with %q", test.fabric, test.size, test.available, test.must)
		t.Run(name, func(t *testing.T) {
			f := fabricOf(test.fabric)
			resource := NewPlan(f.node(), defaults()).Resources[0]
			x := NewDeviceSet(resource.Devices, resource.Units, resource.Policy)
			mask := func(text string) (m gpusMask) {
				for word := range strings.FieldsSeq(text) {
					var gpu int
					if _, err := fmt.Sscan(word, &gpu); err != nil {
						t.Fatal(err)
					}
					m |= 1 << gpu
				}
				return m
			}
			if got, want := f.prefer(x, resource, mask(test.available), mask(test.must), test.size), mask(test.want); got != want {
				t.Errorf("got %08b, want %08b", got, want)
			}
		})
	}
}
