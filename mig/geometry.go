package mig

import (
	"slices"
	"strings"
)

// Geometry is how a GPU model can be partitioned. GeometryOf has the models that NVIDIA has
// published. For a GPU of a node, the driver is the authority, and its Geometry is made from the
// driver's answers.
type Geometry struct {
	// Slices is the number of compute slices.
	Slices int
	// Slots is the number of memory slots, the unit of placements.
	Slots int
	// Profiles are the GPU instances that the GPU can have, sorted by Compare.
	Profiles []ProfileInfo
	// Memory is the memory of an instance in MiB, by profile, if the driver reports it.
	Memory map[Profile]uint64
	// Engines are the engines of an instance, by profile, if the driver reports them.
	Engines map[Profile]Engines
	// Unlisted is true if MIG mode is off and the driver lists the GPU's profiles only while it is
	// on. Profiles are then the ones published for the model, none for an unknown model, and the
	// driver's may differ.
	Unlisted bool
	// Renamed maps a profile's published name to the driver's name, where the driver has another
	// name for the same profile number; nil for none. Only the driver's names count.
	Renamed map[Profile]Profile
}

// Name returns the driver's name of the profile, which may be given by its published name.
func (g Geometry) Name(p Profile) Profile {
	if own, ok := g.Renamed[p.Instance()]; ok {
		own.Compute = p.Compute
		return own
	}
	return p
}

// Named returns the layout with the driver's names.
func (g Geometry) Named(l Layout) Layout {
	l.Partitions = slices.Clone(l.Partitions)
	for i, c := range l.Partitions {
		l.Partitions[i].Profile = g.Name(c.Profile)
	}
	return l
}

// Engines are a GPU instance's resources besides slices and memory.
type Engines struct{ Multiprocessors, CopyEngines, Decoders, Encoders, JPEGEngines, OFAEngines int }

// ProfileInfo describes a GPU instance profile of a GPU model.
type ProfileInfo struct {
	// Profile is the profile's name; its Compute equals its Slices.
	Profile Profile
	// Enum is NVML's number for the profile, the same on every GPU (nvml.h,
	// NVML_GPU_INSTANCE_PROFILE_*).
	Enum int
	// ID is the profile ID that nvidia-smi mig -lgip prints, and that NVML returns
	// for a live GPU instance. It differs between GPU models.
	ID int
	// Size is the number of memory slots that an instance occupies.
	Size int
	// Starts are the slots at which an instance may start, ascending.
	Starts []int
	// Max is the number of instances that fit on an empty GPU.
	Max int
}

// ProfileInfo returns the GPU instance profile for partitions with the profile; false if the GPU
// has none.
func (g Geometry) ProfileInfo(p Profile) (ProfileInfo, bool) {
	instance := g.Name(p).Instance()
	i := slices.IndexFunc(g.Profiles, func(info ProfileInfo) bool { return info.Profile == instance })
	if i < 0 {
		return ProfileInfo{}, false
	}
	return g.Profiles[i], true
}

// Besides slices and slots, partitions share the GPU's media engines (NVIDIA MIG
// User Guide, "Supported MIG Profiles", the columns for NVDEC, NVENC, JPEG and OFA).

// has reports whether the profile has the attribute, which includes the sign.
func (p Profile) has(attribute string) bool {
	names, ok := strings.CutPrefix(p.Attributes, attribute[:1])
	return ok && slices.Contains(strings.Split(names, ","), attribute[1:])
}

// exclude reports whether the two cannot be on one GPU: if one has all media engines, the other
// must have none.
func exclude(p, q Profile) bool {
	return p.has("+me.all") && !q.has("-me") || q.has("+me.all") && !p.has("-me")
}

// shareMaximum reports whether the two count against the same Max. A GPU has only one set of media
// extensions for all profiles that have them, whatever their size.
func shareMaximum(p, q Profile) bool {
	return p == q || p.has("+me") && q.has("+me")
}

// GeometriesOf returns the geometries of a GPU model by its PCI device ID, the upper 16 bits of
// NVML's PCI device ID (0x20B0 in 0x20B010DE). There are none for an unknown model or a model
// without MIG, and several if drivers name the model's profiles differently.
//
// They are for the simulator, and for checking a layout away from its node. The driver of a real
// GPU may have profiles that are not listed here.
//
// Sources: NVIDIA MIG User Guide, "Supported MIG Profiles" (R615, read in November 2026); the
// device filters in mig-parted's config-default.yaml, and the PCI ID repository for models without
// a filter; profile IDs printed by nvidia-smi mig -lgip. NVIDIA's vGPU types name the profiles of
// the H100 with 64 GB, and show that A100X and A30X have the profiles of A100 PCIe 80 GB and A30.
// Placements are published for A30, A100, H100, B200, GB200 and GB300. The other models use the
// rule that these follow: an instance occupies the power of two of slots that holds its share of
// the memory, and starts at a multiple of it.
func GeometriesOf(pciDeviceID uint16) []Geometry {
	var all []Geometry
	for _, m := range models() {
		if slices.Contains(m.devices, pciDeviceID) {
			all = append(all, m.geometry)
		}
	}
	return all
}

// GeometryOf returns the first of GeometriesOf, or false if there is none.
func GeometryOf(pciDeviceID uint16) (Geometry, bool) {
	if all := GeometriesOf(pciDeviceID); len(all) > 0 {
		return all[0], true
	}
	return Geometry{}, false
}

// KnownGeometries returns every geometry of GeometriesOf once, in the same order.
func KnownGeometries() []Geometry {
	var all []Geometry
	for _, m := range models() {
		all = append(all, m.geometry)
	}
	return all
}

// model is the geometry of the GPUs with these PCI device IDs.
type model struct {
	devices  []uint16
	geometry Geometry
}

func models() []model {
	return []model{
		// A100 and A800, 40 GB
		{[]uint16{0x20B0, 0x20B1, 0x20F1, 0x20F6}, sevenSlices(5, 10, 20, 40)},
		{[]uint16{0x2337}, sevenSlices(8, 16, 32, 64)}, // H100 SXM, 64 GB
		// A100, A100X, A800, H100 and H800, 80 GB
		{[]uint16{0x20B2, 0x20B5, 0x20B8, 0x20F3, 0x20F5, 0x2330, 0x2331, 0x2322, 0x2324}, sevenSlices(10, 20, 40, 80)},
		// H100 SXM, H100 NVL and H800 NVL, 94 GB
		{[]uint16{0x2321, 0x2339, 0x233A}, sevenSlices(12, 24, 47, 94)},
		// GH200, H100, H20 and PG506, 96 GB
		{[]uint16{0x2342, 0x233D, 0x2329, 0x20B6}, sevenSlices(12, 24, 48, 96)},
		// H200, H200 NVL and H20, 141 GB
		{[]uint16{0x2335, 0x233B, 0x232C}, sevenSlices(18, 35, 71, 141)},
		{[]uint16{0x2348}, sevenSlices(18, 36, 72, 144)},  // GH200, 144 GB
		{[]uint16{0x2901}, sevenSlices(23, 45, 90, 180)},  // B200, 180 GB
		{[]uint16{0x2941}, sevenSlices(23, 47, 93, 186)},  // GB200, 186 GB
		{[]uint16{0x2941}, sevenSlices(24, 47, 95, 189)},  // GB200, as mig-parted names its profiles
		{[]uint16{0x3182}, sevenSlices(34, 67, 135, 269)}, // B300, 269 GB
		{[]uint16{0x31C2}, sevenSlices(35, 70, 139, 278)}, // GB300, 278 GB
		{[]uint16{0x20B7, 0x20B9}, a30()},                 // A30 and A30X
		{[]uint16{0x2BB1, 0x2BB4, 0x2BB5}, rtxPro6000()},  // workstation, Max-Q, server
		{[]uint16{0x2BB3}, rtxPro5000()},
		{[]uint16{0x2C31, 0x2C3A}, rtxPro4500()}, // workstation, server
	}
}

// sevenSlices returns the geometry of the models with 7 compute slices. They differ only in the
// memory of an eighth, a quarter, a half and the whole GPU, in GB.
func sevenSlices(eighth, quarter, half, whole int) Geometry {
	return Geometry{
		Slices: 7,
		Slots:  8,
		Profiles: []ProfileInfo{
			{Profile{1, 1, eighth, ""}, 0, 19, 1, []int{0, 1, 2, 3, 4, 5, 6}, 7},
			{Profile{1, 1, eighth, "+me"}, 7, 20, 1, []int{0, 1, 2, 3, 4, 5, 6}, 1},
			{Profile{1, 1, quarter, ""}, 9, 15, 2, []int{0, 2, 4, 6}, 4},
			{Profile{2, 2, quarter, ""}, 1, 14, 2, []int{0, 2, 4}, 3},
			{Profile{3, 3, half, ""}, 2, 9, 4, []int{0, 4}, 2},
			{Profile{4, 4, half, ""}, 3, 5, 4, []int{0}, 1},
			{Profile{7, 7, whole, ""}, 4, 0, 8, []int{0}, 1},
		},
	}
}

func a30() Geometry {
	return Geometry{
		Slices: 4,
		Slots:  4,
		Profiles: []ProfileInfo{
			{Profile{1, 1, 6, ""}, 0, 14, 1, []int{0, 1, 2, 3}, 4},
			{Profile{1, 1, 6, "+me"}, 7, 21, 1, []int{0, 1, 2, 3}, 1},
			{Profile{2, 2, 12, ""}, 1, 5, 2, []int{0, 2}, 2},
			{Profile{2, 2, 12, "+me"}, 8, 6, 2, []int{0, 2}, 1},
			{Profile{4, 4, 24, ""}, 3, 0, 4, []int{0}, 1},
		},
	}
}

// rtxPro6000 returns the geometry of the RTX PRO 6000 Blackwell, 96 GB, in all of its editions,
// with driver 575.51.03 or later (MIG User Guide, "RTX PRO 6000 Blackwell MIG Profiles").
func rtxPro6000() Geometry {
	return Geometry{
		Slices: 4,
		Slots:  4,
		Profiles: []ProfileInfo{
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
		},
	}
}

// rtxPro5000 returns the geometry of the RTX PRO 5000 Blackwell, 48 GB. Its IDs are not published.
// The IDs here are those of the profiles with the same share of the RTX PRO 6000 and, with +me, of
// the A30.
func rtxPro5000() Geometry {
	return Geometry{
		Slices: 2,
		Slots:  2,
		Profiles: []ProfileInfo{
			{Profile{1, 1, 24, ""}, 0, 5, 1, []int{0, 1}, 2},
			{Profile{1, 1, 24, "+gfx"}, 10, 35, 1, []int{0, 1}, 2},
			{Profile{1, 1, 24, "+me"}, 7, 6, 1, []int{0, 1}, 1},
			{Profile{1, 1, 24, "+me.all"}, 15, 64, 1, []int{0, 1}, 1},
			{Profile{1, 1, 24, "-me"}, 13, 66, 1, []int{0, 1}, 2},
			{Profile{2, 2, 48, ""}, 1, 0, 2, []int{0}, 1},
			{Profile{2, 2, 48, "+gfx"}, 11, 32, 2, []int{0}, 1},
		},
	}
}

// rtxPro4500 returns the geometry of the RTX PRO 4500 Blackwell, 32 GB, with the same IDs as
// rtxPro5000.
func rtxPro4500() Geometry {
	return Geometry{
		Slices: 2,
		Slots:  2,
		Profiles: []ProfileInfo{
			{Profile{1, 1, 16, ""}, 0, 5, 1, []int{0, 1}, 2},
			{Profile{1, 1, 16, "+gfx"}, 10, 35, 1, []int{0, 1}, 2},
			{Profile{1, 1, 16, "+me.all"}, 15, 64, 1, []int{0, 1}, 1},
			{Profile{1, 1, 16, "-me"}, 13, 66, 1, []int{0, 1}, 2},
			{Profile{2, 2, 32, ""}, 1, 0, 2, []int{0}, 1},
			{Profile{2, 2, 32, "+gfx"}, 11, 32, 2, []int{0}, 1},
		},
	}
}
