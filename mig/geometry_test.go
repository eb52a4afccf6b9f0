package mig_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

const (
	a100       = 0x20B0
	a30        = 0x20B7
	rtxPro5000 = 0x2BB3
	rtxPro6000 = 0x2BB5
)

// GPUs are all known GPUs with their shapes as the MIG User Guide lists
// them: profile × maximum.
var gpus = []struct {
	ids    []uint16
	shapes string
}{
	{[]uint16{0x20B0, 0x20B1, 0x20F1, 0x20F6}, "1g.5gb×7 1g.5gb+me×1 1g.10gb×4 2g.10gb×3 3g.20gb×2 4g.20gb×1 7g.40gb×1"},
	{[]uint16{0x2337}, "1g.8gb×7 1g.8gb+me×1 1g.16gb×4 2g.16gb×3 3g.32gb×2 4g.32gb×1 7g.64gb×1"},
	{[]uint16{0x20B2, 0x20B5, 0x20B8, 0x20F3, 0x20F5, 0x2330, 0x2331, 0x2322, 0x2324}, "1g.10gb×7 1g.10gb+me×1 1g.20gb×4 2g.20gb×3 3g.40gb×2 4g.40gb×1 7g.80gb×1"},
	{[]uint16{0x2321, 0x2339, 0x233A}, "1g.12gb×7 1g.12gb+me×1 1g.24gb×4 2g.24gb×3 3g.47gb×2 4g.47gb×1 7g.94gb×1"},
	{[]uint16{0x2342, 0x233D, 0x2329, 0x20B6}, "1g.12gb×7 1g.12gb+me×1 1g.24gb×4 2g.24gb×3 3g.48gb×2 4g.48gb×1 7g.96gb×1"},
	{[]uint16{0x2335, 0x233B, 0x232C}, "1g.18gb×7 1g.18gb+me×1 1g.35gb×4 2g.35gb×3 3g.71gb×2 4g.71gb×1 7g.141gb×1"},
	{[]uint16{0x2348}, "1g.18gb×7 1g.18gb+me×1 1g.36gb×4 2g.36gb×3 3g.72gb×2 4g.72gb×1 7g.144gb×1"},
	{[]uint16{0x2901}, "1g.23gb×7 1g.23gb+me×1 1g.45gb×4 2g.45gb×3 3g.90gb×2 4g.90gb×1 7g.180gb×1"},
	{[]uint16{0x2941}, "1g.23gb×7 1g.23gb+me×1 1g.47gb×4 2g.47gb×3 3g.93gb×2 4g.93gb×1 7g.186gb×1"},
	{[]uint16{0x3182}, "1g.34gb×7 1g.34gb+me×1 1g.67gb×4 2g.67gb×3 3g.135gb×2 4g.135gb×1 7g.269gb×1"},
	{[]uint16{0x31C2}, "1g.35gb×7 1g.35gb+me×1 1g.70gb×4 2g.70gb×3 3g.139gb×2 4g.139gb×1 7g.278gb×1"},
	{[]uint16{a30, 0x20B9}, "1g.6gb×4 1g.6gb+me×1 2g.12gb×2 2g.12gb+me×1 4g.24gb×1"},
	{[]uint16{rtxPro6000, 0x2BB1, 0x2BB4}, "1g.24gb×4 1g.24gb+gfx×4 1g.24gb+me×1 1g.24gb+me.all×1 1g.24gb-me×4 " +
		"2g.48gb×2 2g.48gb+gfx×2 2g.48gb+me.all×1 2g.48gb-me×2 4g.96gb×1 4g.96gb+gfx×1"},
	{[]uint16{rtxPro5000}, "1g.24gb×2 1g.24gb+gfx×2 1g.24gb+me×1 1g.24gb+me.all×1 1g.24gb-me×2 2g.48gb×1 2g.48gb+gfx×1"},
	{[]uint16{0x2C31, 0x2C3A}, "1g.16gb×2 1g.16gb+gfx×2 1g.16gb+me.all×1 1g.16gb-me×2 2g.32gb×1 2g.32gb+gfx×1"},
}

// enumerations are NVML's shape numbers by slices and attributes (nvml.h,
// NVML_GPU_INSTANCE_PROFILE_*); "double" is 1g with twice the memory.
var enumerations = map[string]int{
	"1": 0, "2": 1, "3": 2, "4": 3, "7": 4, "1+me": 7, "2+me": 8, "1double": 9,
	"1+gfx": 10, "2+gfx": 11, "4+gfx": 12, "1-me": 13, "2-me": 14, "1+me.all": 15, "2+me.all": 16,
}

func TestGeometryOf(t *testing.T) {
	for _, row := range gpus {
		for _, id := range row.ids {
			t.Run(strconv.FormatUint(uint64(id), 16), func(t *testing.T) {
				g := geometry(t, id)
				var shapes []string
				for _, s := range g.Profiles {
					shapes = append(shapes, s.Profile.String()+"×"+strconv.Itoa(s.Max))
				}
				if diff := cmp.Diff(row.shapes, strings.Join(shapes, " ")); diff != "" {
					t.Errorf("shapes (-want +got):\n%s", diff)
				}
				for _, s := range g.Profiles {
					checkShape(t, g, s)
				}
				for i := 1; i < len(g.Profiles); i++ {
					// Place needs it for its first try, not to be right.
					if small, large := g.Profiles[i-1], g.Profiles[i]; len(large.Starts) > len(small.Starts) {
						t.Errorf("%s has more starts than %s", large.Profile, small.Profile)
					}
				}
				sorted := slices.IsSortedFunc(g.Profiles, func(a, b mig.ProfileInfo) int { return a.Profile.Compare(b.Profile) })
				if !sorted {
					t.Error("the shapes are not in the order of Compare")
				}
			})
		}
	}
}

// checkShape checks a shape by the rules of the published GPUs.
func checkShape(t *testing.T, g mig.Geometry, s mig.ProfileInfo) {
	t.Helper()
	p := s.Profile
	key := strconv.Itoa(p.Slices) + p.Attributes
	if p.Slices == 1 && s.Size == 2 {
		key = "1double"
	}
	if want, ok := enumerations[key]; !ok || s.Enum != want {
		t.Errorf("%s has enumeration %d, want %d", p, s.Enum, want)
	}
	if p.Compute != p.Slices {
		t.Errorf("%s is no GPU instance", p)
	}
	whole := g.Profiles[len(g.Profiles)-1].Profile
	share := float64(p.MemoryGB) / float64(whole.MemoryGB) * float64(g.Slots)
	if share < float64(s.Size)*0.9 || share > float64(s.Size)*1.1 {
		t.Errorf("%s takes %d of %d slots for %.2f slots of memory", p, s.Size, g.Slots, share)
	}
	var starts []int
	for start := 0; start+s.Size <= g.Slots; start += s.Size {
		// A start needs a slice below it for each slice of the shape.
		if start+p.Slices <= g.Slices || s.Size > p.Slices && start < g.Slices {
			starts = append(starts, start)
		}
	}
	if diff := cmp.Diff(starts, s.Starts); diff != "" {
		t.Errorf("starts of %s (-rule +table):\n%s", p, diff)
	}
}

func TestPublishedProfileIDs(t *testing.T) {
	for _, row := range []struct {
		name string
		id   uint16
		want map[string]int
	}{
		{"A100", a100, map[string]int{"1g.5gb": 19, "1g.5gb+me": 20, "1g.10gb": 15, "2g.10gb": 14, "3g.20gb": 9, "4g.20gb": 5, "7g.40gb": 0}},
		{"A30", a30, map[string]int{"1g.6gb": 14, "1g.6gb+me": 21, "2g.12gb": 5, "2g.12gb+me": 6, "4g.24gb": 0}},
		{"RTX PRO 6000", rtxPro6000, map[string]int{
			"1g.24gb": 14, "1g.24gb+me": 21, "1g.24gb+gfx": 47, "1g.24gb+me.all": 65, "1g.24gb-me": 67,
			"2g.48gb": 5, "2g.48gb+gfx": 35, "2g.48gb+me.all": 64, "2g.48gb-me": 66, "4g.96gb": 0, "4g.96gb+gfx": 32,
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			got := map[string]int{}
			for _, s := range geometry(t, row.id).Profiles {
				got[s.Profile.String()] = s.ID
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("IDs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestGeometryOfUnknownGPU(t *testing.T) {
	const t4 = 0x1EB8
	if g, ok := mig.GeometryOf(t4); ok || len(g.Profiles) != 0 {
		t.Errorf("a T4 can be cut: %v", g)
	}
}

func TestGeometriesShareNothing(t *testing.T) {
	geometry(t, a100).Profiles[0].Starts[0] = 99
	if got := geometry(t, a100).Profiles[0].Starts[0]; got != 0 {
		t.Errorf("a caller's change shows: start %d", got)
	}
}

func TestShapeOfProfile(t *testing.T) {
	g := geometry(t, a100)
	for _, row := range []struct{ name, profile, want string }{
		{"a GPU instance", "2g.10gb", "2g.10gb"},
		{"a compute instance", "1c.2g.10gb", "2g.10gb"},
		{"1g with double memory", "1g.10gb", "1g.10gb"},
		{"another GPU's", "2g.20gb", ""},
		{"an attribute that the GPU lacks", "1g.5gb+gfx", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			shape, ok := g.ProfileInfo(profile(t, row.profile))
			if shape.Profile.String() != row.want || ok != (row.want != "") {
				t.Errorf("shape %v, %v", shape, ok)
			}
		})
	}
}

func geometry(t testing.TB, id uint16) mig.Geometry {
	t.Helper()
	g, ok := mig.GeometryOf(id)
	if !ok {
		t.Fatalf("GPU %x is unknown", id)
	}
	return g
}

func TestGeometries(t *testing.T) {
	var want []mig.Geometry
	for _, row := range gpus {
		want = append(want, mig.GeometriesOf(row.ids[0])...)
	}
	if diff := cmp.Diff(want, mig.KnownGeometries()); diff != "" {
		t.Errorf("geometries (-want +got):\n%s", diff)
	}
	for id := range 1 << 16 {
		g, ok := mig.GeometryOf(uint16(id))
		if ok && !slices.ContainsFunc(want, func(w mig.Geometry) bool { return cmp.Equal(w, g) }) {
			t.Errorf("%04X has a geometry that is not among them", id)
		}
	}
}
