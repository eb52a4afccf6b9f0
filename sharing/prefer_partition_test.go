package sharing

import (
	"slices"
	"strings"
	"testing"
)

// partitionsOf returns what is known of the units that devices name: "A1" is a
// partition of board A.
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
		policy    Policy
		available string
		must      string
		size      int
		want      string
	}{
		{"packed: the board in use", six, Packed, "A1 A2 A3 B1 B3", "", 1, "B1"},
		{"packed: the fuller board", six, Packed, "A2 A3 B2", "", 1, "B2"},
		{"packed: then the next board", six, Packed, "A2 A3 B2", "", 2, "B2 A2"},
		{"packed: stays on the board", six, Packed, "A1 A2 A3 B1 B2 B3", "", 4, "A1 A2 A3 B1"},
		{"packed: goes where the container is", six, Packed, "A1 A2 A3 B1 B3", "B2", 3, "B2 B1 B3"},
		{"packed: where the container is among equals", six, Packed, "A2 A3 B1 B3", "B2", 2, "B2 B1"},
		{"packed: a sick partition is not a used one", six + " !B2", Packed, "A1 A2 A3 B1 B3", "", 1, "A1"},
		{"packed: the sounder board among equals", six + " !A2", Packed, "A1 A3 B1 B2 B3", "", 1, "B1"},
		{"packed: board before partition", shared, Packed, "A1::1 A2::0 A2::1 B1::1 B2::1", "", 2, "B1::1 B2::1"},
		{"packed: the fuller partition of the board", shared, Packed, "A1::0 A1::1 A2::1", "", 1, "A2::1"},
		{"packed: stays on the partition", shared, Packed, "A1::0 A1::1 A2::0 A2::1 B1::0", "", 4, "B1::0 A1::0 A1::1 A2::0"},
		{"packed: the first board among equals", shared, Packed, "A2::0 A2::1 B1::1 B2::1", "", 1, "A2::0"},
		{"packed: the partition the container has among equals", shared, Packed, "A1::1 A2::1", "A2::0", 2, "A2::0 A2::1"},
		{"distributed: the board least in use among equals", six, Distributed, "A2 A3 B1 B2 B3", "", 1, "B1"},
		{"distributed: over the boards", six, Distributed, "A1 A2 A3 B1 B2 B3", "", 3, "A1 B1 A2"},
		{"distributed: away from the container's board", six, Distributed, "A1 A2 B1 B2", "A3", 2, "A3 B1"},
		{"distributed: fewer picks among equal boards", six, Distributed, "A1 A2 B1 B2", "B3", 2, "B3 A1"},
		{"distributed: partition before board", shared, Distributed, "A2::0 A2::1 B1::1 B2::1", "", 1, "A2::0"},
		{"spread: distinct boards", six, Spread, "A1 A2 B1", "", 2, "A1 B1"},
		{"spread: a distinct board though it is fuller", six, Spread, "A1 A2 A3 B1", "", 2, "A1 B1"},
		{"spread: distinct partitions before boards", shared, Spread, "A1::0 A2::0 B1::0 B1::1", "", 3, "B1::0 A1::0 A2::0"},
		{"spread: the least used partition", shared, Spread, "A1::1 A2::0 A2::1", "", 1, "A2::0"},
		{"spread: the least used board among equals", shared, Spread, "A1::0 A1::1 B1::0 B1::1 B2::0", "", 1, "B1::0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			devices := units(t, test.devices)
			got := NewIndex(devices, partitionsOf(devices), test.policy).
				Prefer(strings.Fields(test.available), strings.Fields(test.must), test.size)
			if want := strings.Fields(test.want); !slices.Equal(got, want) {
				t.Errorf("Prefer = %q, want %q", got, want)
			}
		})
	}
}

// Units of which no board is known do not count as being on one.
func TestPreferUnknownBoards(t *testing.T) {
	devices := units(t, "U1×1 U2×1 U3×1 X1×1 X2×1")
	hardware := append([]Unit{{ID: "U1"}, {ID: "U2"}, {ID: "U3"}}, partitionsOf(devices[3:])...)
	if got, want := NewIndex(devices, hardware, Packed).Prefer([]string{"U3", "X2"}, nil, 1), []string{"X2"}; !slices.Equal(got, want) {
		t.Errorf("Prefer = %q, want %q", got, want)
	}
}
