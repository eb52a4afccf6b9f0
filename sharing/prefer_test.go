package sharing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// units returns the devices of units written "A×4 B×1"; a unit with one replica
// is exclusive. IDs that follow "!" are unhealthy: "A×4 !A::0".
func units(t testing.TB, text string) []Device {
	t.Helper()
	var devices []Device
	for word := range strings.FieldsSeq(text) {
		if id, unhealthy := strings.CutPrefix(word, "!"); unhealthy {
			at := slices.IndexFunc(devices, func(d Device) bool { return d.ID == id })
			devices[at].Healthy = false
			continue
		}
		var replicas int
		unit, count, _ := strings.Cut(word, "×")
		count, mps := strings.CutSuffix(count, "m") // "A×4m" is by MPS.
		if _, err := fmt.Sscan(count, &replicas); err != nil {
			t.Fatal(err)
		}
		for replica := range replicas {
			id := unit
			if replicas > 1 {
				id = NewDeviceID(unit, replica)
			}
			if mps {
				id = NewMPSDeviceID(unit, replica, replicas)
			}
			devices = append(devices, Device{ID: id, Unit: unit, Healthy: true})
		}
	}
	return devices
}

// ids returns the device IDs of units written as for units.
func ids(t testing.TB, text string) []string {
	t.Helper()
	var all []string
	for _, device := range units(t, text) {
		all = append(all, device.ID)
	}
	return all
}

func TestPrefer(t *testing.T) {
	const gpus8 = "A::0 A::1 A::2 B::0 B::1 B::2 B::3 B::4"
	for _, test := range []struct {
		name      string
		devices   string
		policy    AllocationPolicy
		available string
		must      string
		size      int
		want      string
	}{
		{"distributed: least used unit", "A×4 B×4", Distributed, "A::3 B::2 B::3", "", 1, "B::2"},
		{"distributed: picks count", "A×4 B×4", Distributed, "A::2 A::3 B::0 B::1 B::2 B::3", "", 4, "B::0 B::1 A::2 B::2"},
		{"distributed: distinct where it can", "A×3 B×3 C×3", Distributed, "A::0 A::1 A::2 B::0 B::1 B::2 C::0 C::1 C::2", "", 4, "A::0 B::0 C::0 A::1"},
		{"distributed: fewer picks among equals", "A×4 B×4", Distributed, "A::0 A::1 B::1 B::2 A::2 A::3 B::3", "A::0", 2, "A::0 B::1"},
		{"distributed: an unhealthy replica is not a used one", "A×4 B×4 !A::0 !A::1", Distributed, "A::2 A::3 B::1 B::2 B::3", "", 1, "A::2"},
		{"distributed: fewer unhealthy among equals", "A×4 B×4 !A::0", Distributed, "A::1 A::2 A::3 B::0 B::1 B::2 B::3", "", 1, "B::0"},
		{"packed: most used unit", "A×4 B×4", Packed, "A::0 A::1 A::2 A::3 B::2 B::3", "", 3, "B::2 B::3 A::0"},
		{"packed: an unhealthy replica is not a used one", "A×4 B×4 !A::0", Packed, "A::1 A::2 A::3 B::0 B::1 B::2 B::3", "", 1, "B::0"},
		{"packed: stays where it began", "A×2 B×2 C×2", Packed, "A::0 A::1 B::0 B::1 C::0 C::1", "", 3, "A::0 A::1 B::0"},
		{"packed: goes where the container is", "A×3 B×3", Packed, "A::0 A::1 B::0 B::1 B::2", "B::0 B::1", 3, "B::0 B::1 B::2"},
		{"packed: more picks among equals", "A×4 B×4", Packed, "A::1 A::2 A::3 B::0 B::1 B::2 B::3", "B::2", 2, "B::2 B::0"},
		{"spread: distinct though one is less used", "A×8 B×8", Spread, gpus8, "", 2, "B::0 A::0"},
		{"spread: what the container has counts", "A×8 B×8", Spread, gpus8, "B::4", 2, "B::4 A::0"},
		{"spread: again when all have one", "A×8 B×8", Spread, gpus8, "", 3, "B::0 A::0 B::1"},
		{"spread: round by round", "A×8 B×8", Spread, gpus8, "", 5, "B::0 A::0 B::1 A::1 B::2"},
		{"unknown policy is distributed", "A×4 B×4", "", "A::3 B::2 B::3", "", 1, "B::2"},
		{"exclusive units in order", "A×1 B×1 C×1 D×1", Distributed, "D B C", "", 2, "B C"},
		{"exclusive units in order, packed", "A×1 B×1 C×1 D×1", Packed, "D B C", "", 2, "B C"},
		{"exclusive units in order, spread", "A×1 B×1 C×1 D×1", Spread, "D B C", "A", 3, "A B C"},
		{"exclusive beside shared", "A×2 B×1", Distributed, "A::1 B", "", 1, "B"},
		{"must alone", "A×2 B×2", Distributed, "A::0 A::1 B::0 B::1", "B::1", 1, "B::1"},
		{"must that is not available", "A×2 B×2", Distributed, "B::0", "A::1", 2, "A::1 B::0"},
		{"must that is not available is not used by pods", "A×3 B×3", Distributed, "A::0 A::2 B::0", "A::1", 2, "A::1 A::0"},
		{"must that is unhealthy", "A×2 B×2 !A::1", Distributed, "A::0 B::0 B::1", "A::1", 2, "A::1 B::0"},
		{"must that is unknown", "A×2", Distributed, "X::1 A::0", "X::1", 2, "X::1 A::0"},
		{"more must than wanted", "A×2 B×2", Distributed, "A::0", "B::1 A::1 X", 2, "A::1 B::1"},
		{"far more must than wanted", "A×2 B×2", Distributed, "A::0", "B::1 A::1 X", 1, "A::1"},
		{"repeated IDs", "A×2 B×2", Distributed, "A::0 A::0 A::0 X X", "B::0 B::0", 4, "B::0 A::0 X"},
		{"fewer than wanted", "A×2 B×2", Distributed, "B::1 A::0", "", 5, "A::0 B::1"},
		{"unknown IDs last", "A×2", Distributed, "Y X A::1", "", 2, "A::1 X"},
		{"unhealthy IDs before unknown ones", "A×2 B×1 !A::0", Distributed, "X A::0 B", "", 3, "B A::0 X"},
		{"only unknown IDs", "A×1", Distributed, "Y X", "", 1, "X"},
		{"nothing available", "A×2", Distributed, "", "", 1, ""},
		{"nothing wanted", "A×2", Distributed, "A::0", "A::1", 0, ""},
		{"less than nothing wanted", "A×2", Distributed, "A::0", "", -1, ""},
		{"MPS: one by the policy", "A×3m B×3m", Distributed, "A::0of3 B::0of3 B::1of3 B::2of3", "", 1, "B::0of3"},
		{"MPS: several of one unit", "A×3m B×3m", Distributed, "A::0of3 A::1of3 A::2of3 B::0of3 B::1of3 B::2of3", "", 3, "A::0of3 A::1of3 A::2of3"},
		{"MPS: where there are enough", "A×3m B×3m", Packed, "A::0of3 A::1of3 B::0of3 B::1of3 B::2of3", "", 3, "B::0of3 B::1of3 B::2of3"},
		{"MPS: packed, the fullest that has enough", "A×3m B×3m", Packed, "A::0of3 A::1of3 B::0of3 B::1of3 B::2of3", "", 2, "A::0of3 A::1of3"},
		{"MPS: where the container is", "A×3m B×3m", Distributed, "A::0of3 A::1of3 B::1of3 B::2of3", "B::0of3", 2, "B::0of3 B::1of3"},
		{"MPS: nowhere enough", "A×2m B×2m", Distributed, "A::0of2 B::0of2", "", 2, "A::0of2 B::0of2"},
		{"MPS: beside whole GPUs", "A×2m B×1 C×1 D×1", Distributed, "A::0of2 A::1of2 B C D", "", 3, "B C D"},
		{"no devices", "", Distributed, "A", "", 1, "A"},
	} {
		t.Run(test.name, func(t *testing.T) {
			want := strings.Fields(test.want)
			got := NewDeviceSet(units(t, test.devices), nil, test.policy).
				Prefer(strings.Fields(test.available), strings.Fields(test.must), test.size)
			if !slices.Equal(got, want) {
				t.Errorf("Prefer = %q, want %q", got, want)
			}
			if len(want) == 0 && got != nil {
				t.Errorf("Prefer = %#v, want nil", got)
			}
		})
	}
}

// TestIndexRepeatedID checks that the first device counts if an ID is repeated.
func TestIndexRepeatedID(t *testing.T) {
	devices := units(t, "A×2 B×1 !B")
	repeated := append(slices.Clone(devices[:2]), Device{ID: "A::1", Unit: "C", Healthy: true}, devices[2])
	x := NewDeviceSet(repeated, nil, Distributed)
	for id, want := range map[string]int{"A::0": 0, "A::1": 1, "B": 3} {
		if at, ok := x.Index(id); at != want || !ok {
			t.Errorf("Index(%s) = %d, %t, want %d", id, at, ok, want)
		}
	}
	if at, ok := x.Index("C"); ok {
		t.Errorf("Index of an ID that the list lacks is %d", at)
	}
	// A::1 is held once, and neither of C nor free.
	for _, size := range []int{1, 2} {
		if got := x.Prefer([]string{"A::0", "B"}, nil, size); !slices.Equal(got, []string{"A::0", "B"}[:size]) {
			t.Errorf("Prefer %d = %q", size, got)
		}
	}
	if diff := cmp.Diff(NewDeviceSet(devices, nil, Distributed).newChoice(nil, nil).units, x.newChoice(nil, nil).units, cmp.AllowUnexported(unitState{}, use{})); diff != "" {
		t.Errorf("use of the units (-once +repeated):\n%s", diff)
	}
}

// The caller may go on using its slice.
func TestDeviceSetKeepsItsDevices(t *testing.T) {
	devices := units(t, "A×1 B×1")
	x := NewDeviceSet(devices, nil, Distributed)
	devices[0] = Device{ID: "X"}
	if got := x.Prefer([]string{"A"}, nil, 1); !slices.Equal(got, []string{"A"}) || x.ids[0] != "A" {
		t.Errorf("Prefer = %v, first device %v after the list changed", got, x.ids[0])
	}
}

func TestPreferConcurrently(t *testing.T) {
	x := NewDeviceSet(units(t, "A×8 B×8 C×8"), nil, Distributed)
	available := ids(t, "A×8 B×8 C×8")
	want := x.Prefer(available, available[:1], 5)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 50 {
				if got := x.Prefer(available, available[:1], 5); !slices.Equal(got, want) {
					t.Errorf("Prefer = %q, want %q", got, want)
				}
			}
		})
	}
	group.Wait()
}

// The arguments are the caller's.
func TestPreferLeavesArgumentsAlone(t *testing.T) {
	available, must := []string{"Y", "B", "X", "A"}, []string{"Z", "C", "W"}
	before := [][]string{slices.Clone(available), slices.Clone(must)}
	NewDeviceSet(units(t, "A×1 B×1 C×1"), nil, Distributed).Prefer(available, must, 9)
	if diff := cmp.Diff(before, [][]string{available, must}); diff != "" {
		t.Errorf("the arguments changed (-before +after):\n%s", diff)
	}
}

// partitionsOf returns the hardware of the devices' units: "A1" is a partition of GPU A.
func partitionsOf(devices []Device) []Unit {
	var hardware []Unit
	for _, device := range devices {
		hardware = append(hardware, Unit{ID: device.Unit, GPU: "GPU-" + device.Unit[:1], NUMANode: -1})
	}
	return hardware
}

func TestPreferPartitions(t *testing.T) {
	const (
		six    = "A1×1 A2×1 A3×1 B1×1 B2×1 B3×1"
		shared = "A1×2 A2×2 B1×2 B2×2"
	)
	for _, test := range []struct {
		name      string
		devices   string
		policy    AllocationPolicy
		available string
		must      string
		size      int
		want      string
	}{
		{"packed: the GPU in use", six, Packed, "A1 A2 A3 B1 B3", "", 1, "B1"},
		{"packed: the fuller GPU", six, Packed, "A2 A3 B2", "", 1, "B2"},
		{"packed: then the next GPU", six, Packed, "A2 A3 B2", "", 2, "B2 A2"},
		{"packed: stays on the GPU", six, Packed, "A1 A2 A3 B1 B2 B3", "", 4, "A1 A2 A3 B1"},
		{"packed: goes where the container is", six, Packed, "A1 A2 A3 B1 B3", "B2", 3, "B2 B1 B3"},
		{"packed: where the container is among equals", six, Packed, "A2 A3 B1 B3", "B2", 2, "B2 B1"},
		{"packed: an unhealthy partition is not a used one", six + " !B2", Packed, "A1 A2 A3 B1 B3", "", 1, "A1"},
		{"packed: the sounder GPU among equals", six + " !A2", Packed, "A1 A3 B1 B2 B3", "", 1, "B1"},
		{"packed: GPU before partition", shared, Packed, "A1::1 A2::0 A2::1 B1::1 B2::1", "", 2, "B1::1 B2::1"},
		{"packed: the fuller partition of the GPU", shared, Packed, "A1::0 A1::1 A2::1", "", 1, "A2::1"},
		{"packed: stays on the partition", shared, Packed, "A1::0 A1::1 A2::0 A2::1 B1::0", "", 4, "B1::0 A1::0 A1::1 A2::0"},
		{"packed: the first GPU among equals", shared, Packed, "A2::0 A2::1 B1::1 B2::1", "", 1, "A2::0"},
		{"packed: the partition the container has among equals", shared, Packed, "A1::1 A2::1", "A2::0", 2, "A2::0 A2::1"},
		{"distributed: the GPU least in use among equals", six, Distributed, "A2 A3 B1 B2 B3", "", 1, "B1"},
		{"distributed: over the GPUs", six, Distributed, "A1 A2 A3 B1 B2 B3", "", 3, "A1 B1 A2"},
		{"distributed: away from the container's GPU", six, Distributed, "A1 A2 B1 B2", "A3", 2, "A3 B1"},
		{"distributed: fewer picks among equal GPUs", six, Distributed, "A1 A2 B1 B2", "B3", 2, "B3 A1"},
		{"distributed: partition before GPU", shared, Distributed, "A2::0 A2::1 B1::1 B2::1", "", 1, "A2::0"},
		{"spread: distinct GPUs", six, Spread, "A1 A2 B1", "", 2, "A1 B1"},
		{"spread: a distinct GPU though it is fuller", six, Spread, "A1 A2 A3 B1", "", 2, "A1 B1"},
		{"spread: distinct partitions before GPUs", shared, Spread, "A1::0 A2::0 B1::0 B1::1", "", 3, "B1::0 A1::0 A2::0"},
		{"spread: the least used partition", shared, Spread, "A1::1 A2::0 A2::1", "", 1, "A2::0"},
		{"spread: the least used GPU among equals", shared, Spread, "A1::0 A1::1 B1::0 B1::1 B2::0", "", 1, "B1::0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			devices := units(t, test.devices)
			got := NewDeviceSet(devices, partitionsOf(devices), test.policy).
				Prefer(strings.Fields(test.available), strings.Fields(test.must), test.size)
			if want := strings.Fields(test.want); !slices.Equal(got, want) {
				t.Errorf("Prefer = %q, want %q", got, want)
			}
		})
	}
}

// Units with an unknown GPU do not count as being on the same one.
func TestPreferUnknownGPUs(t *testing.T) {
	devices := units(t, "U1×1 U2×1 U3×1 X1×1 X2×1")
	hardware := append([]Unit{{ID: "U1"}, {ID: "U2"}, {ID: "U3"}}, partitionsOf(devices[3:])...)
	if got, want := NewDeviceSet(devices, hardware, Packed).Prefer([]string{"U3", "X2"}, nil, 1), []string{"X2"}; !slices.Equal(got, want) {
		t.Errorf("Prefer = %q, want %q", got, want)
	}
}

// load counts by unit: devices that pods use, that the container must have,
// that could be picked.
type load struct {
	used, required, left int
	// GPU is the unit's GPU.
	gpu string
}

// cost is minimised by a policy, the first number first, for so many devices taken of each unit.
type cost [4]int

func (p AllocationPolicy) cost(loads []load, picks []int) cost {
	gpus, gpuPicks := map[string]*load{}, map[string]int{}
	for u, unit := range loads {
		if gpus[unit.gpu] == nil {
			gpus[unit.gpu] = &load{}
		}
		gpus[unit.gpu].used += unit.used
		gpus[unit.gpu].required += unit.required
		gpuPicks[unit.gpu] += picks[u]
	}
	// used and more are summed over the devices taken: what pods have of the unit, and what the container had of it
	// before.
	sum := func(unit load, count int) (used, more int) {
		for already := range count {
			used, more = used+unit.used, more+unit.required+already
		}
		return used, more
	}
	var used, more, gpuUsed, gpuMore, inUse int
	for u, count := range picks {
		a, b := sum(loads[u], count)
		used, more = used+a, more+b
	}
	for name, count := range gpuPicks {
		a, b := sum(*gpus[name], count)
		gpuUsed, gpuMore = gpuUsed+a, gpuMore+b
		inUse += count * (gpus[name].used + gpus[name].required)
	}
	switch p {
	case Packed:
		return cost{-inUse}
	case Spread:
		return cost{more, gpuMore, used + more, gpuUsed + gpuMore}
	case Distributed:
		return cost{used + more, more, gpuUsed + gpuMore, gpuMore}
	}
	panic(fmt.Sprintf("cost does not say what policy %q minimises", p))
}

// gpuOf is the unit's GPU, if known.
func (q question) gpuOf(unit string) string {
	for _, u := range q.units {
		if u.ID == unit {
			return u.GPU
		}
	}
	return unit
}

// checkBest compares the healthy devices picked with every other way to pick as
// many.
func checkBest(t *testing.T, q question, policy AllocationPolicy, got []string) {
	t.Helper()
	var loads []load
	var picks []int
	wanted := 0
	var last string
	for _, device := range q.devices {
		if device.Unit != last {
			last = device.Unit
			loads, picks = append(loads, load{gpu: q.gpuOf(last)}), append(picks, 0)
		}
		unit := &loads[len(loads)-1]
		switch {
		case slices.Contains(q.must, device.ID):
			unit.required++
		case !device.Healthy:
		case !slices.Contains(q.available, device.ID):
			unit.used++
		default:
			unit.left++
			if slices.Contains(got, device.ID) {
				picks[len(picks)-1]++
				wanted++
			}
		}
	}
	mine := policy.cost(loads, picks)
	everyWay(loads, nil, wanted, func(other []int) {
		if c := policy.cost(loads, other); slices.Compare(c[:], mine[:]) < 0 {
			t.Errorf("%+v: %q takes %v of %+v at cost %v, but %v is %v", q, got, picks, loads, mine, other, c)
		}
	})
}

// everyWay calls visit with each way to take so many devices of the units.
func everyWay(loads []load, sofar []int, wanted int, visit func([]int)) {
	if len(sofar) == len(loads) {
		if wanted == 0 {
			visit(sofar)
		}
		return
	}
	for count := range 1 + min(wanted, loads[len(sofar)].left) {
		everyWay(loads, append(slices.Clone(sofar), count), wanted-count, visit)
	}
}

// whole returns the unit of a device that is a whole GPU alone; nil for any
// other.
func (q question) whole(id string) *Unit {
	for i := range q.units {
		if u := &q.units[i]; u.ID == id && !u.Partition() {
			return u
		}
	}
	return nil
}

// free lists the healthy devices that may be chosen.
func (q question) free() []string {
	var free []string
	for _, device := range q.devices {
		if device.Healthy && slices.Contains(q.available, device.ID) && !slices.Contains(q.must, device.ID) {
			free = append(free, device.ID)
		}
	}
	return free
}

// byLinks reports whether links decide instead of the policy.
func (q question) byLinks() bool {
	free := q.free()
	return len(free) > 0 && !slices.ContainsFunc(free, func(id string) bool { return q.whole(id) == nil })
}

// checkBestLinked compares the GPUs picked with every other set.
func checkBestLinked(t *testing.T, q question, got []string) {
	t.Helper()
	sum := func(ids []string) int {
		total := 0
		for i, a := range ids {
			for _, b := range ids[:i] {
				if u, v := q.whole(a), q.whole(b); u != nil && v != nil {
					total += pairScore(linkTo(u, b), linkTo(v, a), numaScore(u, v))
				}
			}
		}
		return total
	}
	free := q.free()
	var picked, others, best []string
	for _, id := range got {
		if slices.Contains(free, id) {
			picked = append(picked, id)
		} else if slices.Contains(q.must, id) {
			others = append(others, id)
		}
	}
	var most [2]int
	everySet(free, len(picked), nil, func(set []string) {
		setScore := [2]int{sum(slices.Concat(others, set)), sum(without(free, set))}
		if best == nil || slices.Compare(setScore[:], most[:]) > 0 {
			best, most = set, setScore
		}
	})
	if !slices.Equal(picked, best) {
		t.Errorf("%+v: %q, but the best of %q with %q are %q", q, got, free, others, best)
	}
}

func linkTo(u *Unit, peer string) Link {
	for _, link := range u.Links {
		if link.Peer == peer {
			return link
		}
	}
	return Link{}
}

// Large questions: each pick must be the best at that point by a plain search.
func TestPreferPicksTheBestEachTime(t *testing.T) {
	for _, policy := range AllocationPolicies() {
		for _, gpus := range []int{1, 2, 7, 50} {
			t.Run(fmt.Sprintf("%s on %d GPUs", policy, gpus), func(t *testing.T) {
				r := rand.New(rand.NewPCG(3, uint64(gpus)))
				var devices []Device
				var available []string
				var hardware []Unit
				loads, gpuLoads := make([]load, 50), map[string]*load{}
				for u := range loads {
					unit := Unit{ID: string(rune('A' + u)), GPU: fmt.Sprint("GPU-", u%gpus)}
					if gpuLoads[unit.GPU] == nil {
						gpuLoads[unit.GPU] = &load{}
					}
					hardware, loads[u].gpu = append(hardware, unit), unit.GPU
					for replica := range 20 {
						device := Device{ID: NewDeviceID(unit.ID, replica), Unit: unit.ID, Healthy: true}
						devices = append(devices, device)
						if r.IntN(3) == 0 {
							available = append(available, device.ID)
							loads[u].left++
						} else {
							loads[u].used++
							gpuLoads[unit.GPU].used++
						}
					}
				}
				for i, id := range NewDeviceSet(devices, hardware, policy).Prefer(available, nil, 200) {
					unit, _, _ := ParseDeviceID(id)
					at := int([]rune(unit)[0] - 'A')
					mine := policy.rank(loads[at], *gpuLoads[loads[at].gpu], at%gpus)
					for u, other := range loads {
						rank := policy.rank(other, *gpuLoads[other.gpu], u%gpus)
						if other.left > 0 && slices.Compare(append(rank[:], u), append(mine[:], at)) < 0 {
							t.Fatalf("pick %d is of unit %d at %v, but unit %d is at %v", i, at, mine, u, rank)
						}
					}
					loads[at].left--
					loads[at].required++
					gpuLoads[loads[at].gpu].required++
				}
			})
		}
	}
}

// rank is the place of a healthy unit of a GPU: of two, the lesser is picked
// from first.
func (p AllocationPolicy) rank(unit, gpu load, number int) [5]int {
	load, gpuLoad := unit.used+unit.required, gpu.used+gpu.required
	switch p {
	case Packed:
		return [5]int{-gpuLoad, -gpu.required, number, -load, -unit.required}
	case Spread:
		return [5]int{unit.required, gpu.required, load, gpuLoad}
	case Distributed:
		return [5]int{load, unit.required, gpuLoad, gpu.required}
	}
	panic(fmt.Sprintf("rank does not say which unit policy %q picks first", p))
}
