package mig

// GeometryOf is the geometry of the board with that PCI device ID, the upper 16
// bits of NVML's PCI device ID (0x20B0 in 0x20B010DE); false for a board that
// is not known or has no MIG.
//
// It serves the simulator and the validation of a layout away from its node. A
// node's own boards are described by their driver, which may know shapes that
// are not listed here.
//
// Sources: NVIDIA MIG User Guide, "Supported MIG Profiles"; the device filters
// of mig-parted's config-default.yaml; profile IDs from listings of nvidia-smi
// mig -lgip. Placements are published for A30, A100, H100, B200, GB200 and
// GB300; the other boards follow by the rule that all those obey: a shape takes
// the power of two of slots that holds its share of the memory, and starts at a
// multiple of it.
func GeometryOf(pciDeviceID uint16) (Geometry, bool) {
	switch pciDeviceID {
	case 0x20B0, 0x20B1, 0x20F1, 0x20F6: // A100 and A800, 40 GB
		return sevenSlices(5, 10, 20, 40), true
	case 0x20B2, 0x20B5, 0x20F3, 0x20F5, // A100 and A800, 80 GB
		0x2330, 0x2331, 0x2322, 0x2324: // H100 and H800, 80 GB
		return sevenSlices(10, 20, 40, 80), true
	case 0x2321, 0x233A: // H100 NVL and H800 NVL, 94 GB
		return sevenSlices(12, 24, 47, 94), true
	case 0x2342, 0x233D, 0x2329, 0x20B6: // GH200, H100, H20 and PG506, 96 GB
		return sevenSlices(12, 24, 48, 96), true
	case 0x2335, 0x233B: // H200 and H200 NVL, 141 GB
		return sevenSlices(18, 35, 71, 141), true
	case 0x2348: // GH200, 144 GB
		return sevenSlices(18, 36, 72, 144), true
	case 0x2901: // B200, 180 GB
		return sevenSlices(23, 45, 90, 180), true
	case 0x2941: // GB200, 186 GB
		return sevenSlices(23, 47, 93, 186), true
	case 0x3182: // B300, 269 GB
		return sevenSlices(34, 67, 135, 269), true
	case 0x31C2: // GB300, 278 GB
		return sevenSlices(35, 70, 139, 278), true
	case 0x20B7:
		return a30(), true
	case 0x2BB5:
		return rtxPro6000(), true
	}
	return Geometry{}, false
}

// Geometries are all that GeometryOf knows, each once: what any published board
// can be cut into. The order is that of GeometryOf.
func Geometries() []Geometry {
	var all []Geometry
	for _, id := range []uint16{
		0x20B0, 0x20B2, 0x2321, 0x2342, 0x2335, 0x2348, 0x2901, 0x2941, 0x3182, 0x31C2, 0x20B7, 0x2BB5,
	} {
		geometry, _ := GeometryOf(id)
		all = append(all, geometry)
	}
	return all
}

// sevenSlices is the one geometry of all boards with 7 compute slices, which
// differ only in the memory, in GB, of an eighth, a quarter, a half and the
// whole of the board.
func sevenSlices(eighth, quarter, half, whole int) Geometry {
	return Geometry{Slices: 7, Slots: 8, Shapes: []Shape{
		{Profile{1, 1, eighth, ""}, 0, 19, 1, []int{0, 1, 2, 3, 4, 5, 6}, 7},
		{Profile{1, 1, eighth, "+me"}, 7, 20, 1, []int{0, 1, 2, 3, 4, 5, 6}, 1},
		{Profile{1, 1, quarter, ""}, 9, 15, 2, []int{0, 2, 4, 6}, 4},
		{Profile{2, 2, quarter, ""}, 1, 14, 2, []int{0, 2, 4}, 3},
		{Profile{3, 3, half, ""}, 2, 9, 4, []int{0, 4}, 2},
		{Profile{4, 4, half, ""}, 3, 5, 4, []int{0}, 1},
		{Profile{7, 7, whole, ""}, 4, 0, 8, []int{0}, 1},
	}}
}

func a30() Geometry {
	return Geometry{Slices: 4, Slots: 4, Shapes: []Shape{
		{Profile{1, 1, 6, ""}, 0, 14, 1, []int{0, 1, 2, 3}, 4},
		{Profile{1, 1, 6, "+me"}, 7, 21, 1, []int{0, 1, 2, 3}, 1},
		{Profile{2, 2, 12, ""}, 1, 5, 2, []int{0, 2}, 2},
		{Profile{2, 2, 12, "+me"}, 8, 6, 2, []int{0, 2}, 1},
		{Profile{4, 4, 24, ""}, 3, 0, 4, []int{0}, 1},
	}}
}

// rtxPro6000 is the RTX PRO 6000 Blackwell, 96 GB, with a driver from
// 575.51.03 on.
func rtxPro6000() Geometry {
	return Geometry{Slices: 4, Slots: 4, Shapes: []Shape{
		{Profile{1, 1, 24, ""}, 0, 14, 1, []int{0, 1, 2, 3}, 4},
		{Profile{1, 1, 24, "+gfx"}, 10, 47, 1, []int{0, 1, 2, 3}, 4},
		{Profile{1, 1, 24, "+me"}, 7, 21, 1, []int{0, 1, 2, 3}, 1},
		{Profile{1, 1, 24, "+me.all"}, 15, 65, 1, []int{0, 1, 2, 3}, 1},
		{Profile{1, 1, 24, "-me"}, 13, 67, 1, []int{0, 1, 2, 3}, 4},
		{Profile{2, 2, 48, ""}, 1, 5, 2, []int{0, 2}, 2},
		{Profile{2, 2, 48, "+gfx"}, 11, 35, 2, []int{0, 2}, 2},
		{Profile{2, 2, 48, "+me.all"}, 16, 64, 2, []int{0, 2}, 1},
		{Profile{2, 2, 48, "-me"}, 14, 66, 2, []int{0, 2}, 2},
		{Profile{4, 4, 96, ""}, 3, 0, 4, []int{0}, 1},
		{Profile{4, 4, 96, "+gfx"}, 12, 32, 4, []int{0}, 1},
	}}
}
