package units

import (
	"math/rand/v2"
	"reflect"
	"testing"
)

// Each row is a GPU with one partition.
func TestOwners(t *testing.T) {
	onlyPartition := func(u Unit) bool { return u.Partition() }
	pause, release := Reservation{Purpose: Pause, GPU: "A", Text: "pause"}, Reservation{Purpose: Release, GPU: "A", Text: "release"}
	change, daemon := Reservation{Purpose: MIGChange, GPU: "A", Text: "change"}, Reservation{Purpose: MPSDaemon, GPU: "A", Text: "daemon"}
	begun := change
	begun.Begun, begun.Text = true, "begun"
	for _, test := range []struct {
		name             string
		gpu, partition   Path
		gpuDRA, partDRA  bool
		reservations     []Reservation
		owner, partOwner Owner
		why, partWhy     string
	}{
		{name: "the device plugin's", owner: Owner{Path: Plugin, Offered: true}, partOwner: Owner{Path: Plugin, Offered: true}},
		{name: "wanted by DRA", gpuDRA: true, partDRA: true, owner: Owner{Path: Plugin}, partOwner: Owner{Path: Plugin}},
		{name: "leaves the device plugin", partition: LeavingPlugin, partDRA: true, owner: Owner{Offered: true}, partOwner: Owner{Path: LeavingPlugin}},
		{name: "DRA's", partition: DRA, partDRA: true, owner: Owner{Offered: true}, partOwner: Owner{Path: DRA, Offered: true}},
		{name: "leaves DRA", partition: LeavingDRA, owner: Owner{Offered: true}, partOwner: Owner{Path: LeavingDRA}},
		{name: "not wanted by DRA any more", partition: DRA, owner: Owner{Offered: true}, partOwner: Owner{Path: DRA}},
		{name: "the GPU is divided on demand", gpu: DRA, gpuDRA: true, partDRA: true, owner: Owner{Path: DRA, Offered: true}, partOwner: Owner{Path: DRA, Offered: true}},
		{name: "DRA's, and its GPU leaves the device plugin", gpu: LeavingPlugin, partition: DRA, gpuDRA: true, partDRA: true, owner: Owner{Path: LeavingPlugin}, partOwner: Owner{Path: DRA, Offered: true}},
		{name: "its GPU leaves the device plugin", gpu: LeavingPlugin, gpuDRA: true, partDRA: true, owner: Owner{Path: LeavingPlugin}, partOwner: Owner{Path: LeavingPlugin}},

		{name: "released", reservations: []Reservation{release}, owner: Owner{Offered: true}, partOwner: Owner{Offered: true}, why: "release", partWhy: "release"},
		{name: "all GPUs", reservations: []Reservation{{Purpose: Pause, Text: "pause"}}, owner: Owner{Offered: true}, partOwner: Owner{Offered: true}, why: "pause", partWhy: "pause"},
		{name: "another GPU", reservations: []Reservation{{Purpose: Release, GPU: "B"}}, owner: Owner{Offered: true}, partOwner: Owner{Offered: true}},
		{name: "only the partition", reservations: []Reservation{{Purpose: MIGChange, GPU: "A", Only: onlyPartition, Text: "change"}}, owner: Owner{Offered: true}, partOwner: Owner{Offered: true}, partWhy: "change"},
		{name: "pause before release", reservations: []Reservation{release, pause}, owner: Owner{Offered: true}, partOwner: Owner{Offered: true}, why: "pause", partWhy: "pause"},
		{name: "release before change", reservations: []Reservation{change, release}, owner: Owner{Offered: true}, partOwner: Owner{Offered: true}, why: "release", partWhy: "release"},
		{name: "change before daemon", reservations: []Reservation{daemon, change}, owner: Owner{Offered: true}, partOwner: Owner{Offered: true}, why: "change", partWhy: "change"},
		{name: "a change that has begun before all", reservations: []Reservation{pause, release, daemon, begun}, owner: Owner{Offered: true}, partOwner: Owner{Offered: true}, why: "begun", partWhy: "begun"},
	} {
		t.Run(test.name, func(t *testing.T) {
			owners := Owners([]Unit{
				{UUID: "A", GPU: "A", Path: test.gpu, ForDRA: test.gpuDRA},
				{UUID: "M", GPU: "A", Path: test.partition, ForDRA: test.partDRA},
			}, test.reservations)
			for unit, want := range map[string]struct {
				Owner
				why string
			}{"A": {test.owner, test.why}, "M": {test.partOwner, test.partWhy}} {
				got, why := owners[unit], ""
				if got.Reserved != nil {
					why, got.Reserved = got.Reserved[0].Text, nil
				}
				if got.Path != want.Path || got.Offered != want.Offered || why != want.why {
					t.Errorf("%s: %+v %q, want %+v %q", unit, got, why, want.Owner, want.why)
				}
			}
		})
	}
}

// The order of units and reservations does not matter, nothing is reserved without a reservation for it, and no
// partition is the device plugin's while its GPU is not.
func FuzzOwners(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		random := rand.New(rand.NewPCG(a, b))
		paths := []Path{Plugin, LeavingPlugin, DRA, LeavingDRA}
		var all []Unit
		for _, gpu := range []string{"A", "B", "C"} {
			all = append(all, Unit{UUID: gpu, GPU: gpu, Path: paths[random.IntN(4)], ForDRA: random.IntN(2) == 0})
			for _, p := range []string{"1", "2"}[:random.IntN(3)] {
				all = append(all, Unit{UUID: gpu + p, GPU: gpu, Path: paths[random.IntN(4)], ForDRA: random.IntN(2) == 0})
			}
		}
		var reservations []Reservation
		for range random.IntN(6) {
			r := Reservation{Purpose: Purpose(random.IntN(4)), GPU: []string{"", "A", "B", "D"}[random.IntN(4)], Begun: random.IntN(4) == 0, Text: string(rune('a' + random.IntN(3)))}
			if random.IntN(2) == 0 {
				only := all[random.IntN(len(all))].UUID
				r.Only = func(u Unit) bool { return u.UUID == only }
			}
			reservations = append(reservations, r)
		}
		say := func(owners map[string]Owner) map[string]string {
			said := map[string]string{}
			for unit, o := range owners {
				said[unit] = string(o.Path)
				if o.Offered {
					said[unit] += " offered"
				}
				for _, r := range o.Reserved {
					said[unit] += " for " + r.Text + string(rune('0'+int(r.Purpose)))
				}
			}
			return said
		}
		owners := Owners(all, reservations)
		for _, u := range all {
			owner, concern := owners[u.UUID], 0
			for _, r := range reservations {
				if r.concerns(u) {
					concern++
				}
				if r.concerns(u) && !owner.ReservedFor(r.Purpose) {
					t.Errorf("%s is not reserved for %d", u.UUID, r.Purpose)
				}
			}
			if concern != len(owner.Reserved) {
				t.Errorf("%s has %d reservations, and %d concern it", u.UUID, len(owner.Reserved), concern)
			}
			if owner.Path == Plugin && owners[u.GPU].Path != Plugin {
				t.Errorf("%s is the device plugin's, and its GPU is not", u.UUID)
			}
		}
		before := say(owners)
		random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		random.Shuffle(len(reservations), func(i, j int) { reservations[i], reservations[j] = reservations[j], reservations[i] })
		if after := say(Owners(all, reservations)); !reflect.DeepEqual(before, after) {
			t.Errorf("%v in one order, %v in another", before, after)
		}
	})
}
