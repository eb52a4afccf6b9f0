package sharing

import (
	"fmt"
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
		if id, sick := strings.CutPrefix(word, "!"); sick {
			at := slices.IndexFunc(devices, func(d Device) bool { return d.ID == id })
			devices[at].Healthy = false
			continue
		}
		var replicas int
		unit, count, _ := strings.Cut(word, "×")
		if _, err := fmt.Sscan(count, &replicas); err != nil {
			t.Fatal(err)
		}
		for replica := range replicas {
			id := unit
			if replicas > 1 {
				id = NewDeviceID(unit, replica)
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
		policy    Policy
		available string
		must      string
		size      int
		want      string
	}{
		{"distributed: least used unit", "A×4 B×4", Distributed, "A::3 B::2 B::3", "", 1, "B::2"},
		{"distributed: picks count", "A×4 B×4", Distributed, "A::2 A::3 B::0 B::1 B::2 B::3", "", 4, "B::0 B::1 A::2 B::2"},
		{"distributed: distinct where it can", "A×3 B×3 C×3", Distributed, "A::0 A::1 A::2 B::0 B::1 B::2 C::0 C::1 C::2", "", 4, "A::0 B::0 C::0 A::1"},
		{"distributed: fewer picks among equals", "A×4 B×4", Distributed, "A::0 A::1 B::1 B::2 A::2 A::3 B::3", "A::0", 2, "A::0 B::1"},
		{"distributed: a sick replica is not a used one", "A×4 B×4 !A::0 !A::1", Distributed, "A::2 A::3 B::1 B::2 B::3", "", 1, "A::2"},
		{"distributed: fewer sick among equals", "A×4 B×4 !A::0", Distributed, "A::1 A::2 A::3 B::0 B::1 B::2 B::3", "", 1, "B::0"},
		{"packed: most used unit", "A×4 B×4", Packed, "A::0 A::1 A::2 A::3 B::2 B::3", "", 3, "B::2 B::3 A::0"},
		{"packed: a sick replica is not a used one", "A×4 B×4 !A::0", Packed, "A::1 A::2 A::3 B::0 B::1 B::2 B::3", "", 1, "B::0"},
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
		{"no devices", "", Distributed, "A", "", 1, "A"},
	} {
		t.Run(test.name, func(t *testing.T) {
			want := strings.Fields(test.want)
			got := NewIndex(units(t, test.devices), nil, test.policy).
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

func TestIndexDevice(t *testing.T) {
	devices := units(t, "A×2 B×1 !B")
	x := NewIndex(append(slices.Clone(devices), Device{ID: "A::1", Unit: "C"}), nil, Distributed)
	for _, want := range devices {
		got, known := x.Device(want.ID)
		if diff := cmp.Diff(want, got); !known || diff != "" {
			t.Errorf("Device(%q) is known: %v (-want +got):\n%s", want.ID, known, diff)
		}
	}
	for _, id := range []string{"", "A", "A::2", "C"} {
		if got, known := x.Device(id); known || got != (Device{}) {
			t.Errorf("Device(%q) = %v, %v; want nothing", id, got, known)
		}
	}
}

// The caller may go on using its slice.
func TestIndexKeepsItsDevices(t *testing.T) {
	devices := units(t, "A×1 B×1")
	x := NewIndex(devices, nil, Distributed)
	devices[0] = Device{ID: "X"}
	if got, known := x.Device("A"); !known || got.ID != "A" {
		t.Errorf("Device(A) = %v, %v after the list changed", got, known)
	}
}

func TestPreferConcurrently(t *testing.T) {
	x := NewIndex(units(t, "A×8 B×8 C×8"), nil, Distributed)
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
	NewIndex(units(t, "A×1 B×1 C×1"), nil, Distributed).Prefer(available, must, 9)
	if diff := cmp.Diff(before, [][]string{available, must}); diff != "" {
		t.Errorf("the arguments changed (-before +after):\n%s", diff)
	}
}
