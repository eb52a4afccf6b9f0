package mig_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
)

func TestPlace(t *testing.T) {
	for _, row := range []struct {
		name         string
		gpu          uint16
		wanted, kept string
		want         string
	}{
		{"nothing", a100, "", "", ""},
		{"nothing beside something", a100, "", "3g.20gb@4:4", ""},
		{"a count of none", a100, "0×1g.5gb", "", ""},
		{"1g at the high end", a100, "1g.5gb", "", "1g.5gb@6:1"},
		{"1g with double memory at the high end", a100, "1g.10gb", "", "1g.10gb@6:2"},
		{"3g at the high end", a100, "3g.20gb", "", "3g.20gb@4:4"},
		{"2g at the low end", a100, "2g.10gb", "", "2g.10gb@0:2"},
		{"seven", a100, "7×1g.5gb", "", "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb@6:1"},
		{"balanced", a100, "2×1g.5gb 2g.10gb 3g.20gb", "", "2g.10gb@0:2 1g.5gb@2:1 1g.5gb@3:1 3g.20gb@4:4"},
		{"balanced on four slices", a30, "2×1g.6gb 2g.12gb", "", "2g.12gb@0:2 1g.6gb@2:1 1g.6gb@3:1"},
		{"4g pushes 3g up", a100, "3g.20gb 4g.20gb", "", "4g.20gb@0:4 3g.20gb@4:4"},
		{"a profile listed twice", a100, "3g.20gb 3g.20gb", "", "3g.20gb@0:4 3g.20gb@4:4"},
		{"around a kept one in the way", a100, "3g.20gb", "1g.5gb@5:1", "3g.20gb@0:4"},
		{"into a hole", a100, "2g.10gb", "1g.5gb@0:1 1g.5gb@1:1 3g.20gb@4:4", "2g.10gb@2:2"},
		{"media extensions beside plain", a100, "1g.5gb+me 6×1g.5gb", "", "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb+me@6:1"},
		{"all media beside none", rtxPro6000, "1g.24gb+me.all 2g.48gb-me", "1g.24gb-me@2:1", "2g.48gb-me@0:2 1g.24gb+me.all@3:1"},

		{"two compute instances fill one GPU instance", a100, "2×1c.2g.10gb", "", "1c.2g.10gb@0:2 1c.2g.10gb@0:2"},
		{"a third opens another", a100, "3×1c.2g.10gb", "", "1c.2g.10gb@0:2 1c.2g.10gb@0:2 1c.2g.10gb@2:2"},
		{"sizes mixed", a100, "1c.3g.20gb 2c.3g.20gb", "", "1c.3g.20gb@4:4 2c.3g.20gb@4:4"},
		{"sizes that cannot share", a100, "2×2c.3g.20gb", "", "2c.3g.20gb@0:4 2c.3g.20gb@4:4"},
		{"into the rest of a kept GPU instance", a100, "2×1c.2g.10gb", "1c.2g.10gb@2:2", "1c.2g.10gb@0:2 1c.2g.10gb@2:2"},
		{"not into a full GPU instance", a100, "1c.2g.10gb", "2g.10gb@0:2", "1c.2g.10gb@2:2"},
		{"not into another kind of GPU instance", a100, "1c.2g.10gb", "1c.3g.20gb@0:4", "1c.2g.10gb@4:2"},
		{"a whole GPU of compute instances", a100, "7×1c.7g.40gb", "", strings.TrimSpace(strings.Repeat("1c.7g.40gb@0:8 ", 7))},

		{"beside a kept shape that is not listed", a100, "2g.10gb", "2g.10gb+new@0:2", "2g.10gb@2:2"},
	} {
		t.Run(row.name, func(t *testing.T) {
			g := geometry(t, row.gpu)
			got, err := g.Place(layout(t, row.wanted), placed(t, row.kept))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(placed(t, row.want), got); diff != "" {
				t.Errorf("placed (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPlaceRefuses(t *testing.T) {
	for _, row := range []struct {
		name         string
		gpu          uint16
		wanted, kept string
		because      error
		want         string
	}{
		{"two of 4g", a100, "2×4g.20gb", "", mig.ErrNoRoom, "place 4g.20gb beside 4g.20gb: no room on the GPU"},
		{"an eighth", a100, "7×1g.5gb 1g.10gb", "", mig.ErrNoRoom, "beside 1g.10gb, "},
		{"more than slices", a100, "9×1g.5gb", "", mig.ErrNoRoom, "place 9 of 1g.5gb on 7 slices: no room"},
		{"beside a whole GPU", a100, "1g.5gb", "7g.40gb@0:8", mig.ErrNoRoom, "place 1g.5gb beside 7g.40gb: no room"},
		{"kept ones in the way", a100, "3g.20gb", "1g.5gb@0:1 1g.5gb@5:1", mig.ErrNoRoom, "place 3g.20gb beside 1g.5gb, 1g.5gb: no room"},
		{"only the last of them", a100, "3g.20gb 2×2g.10gb 1g.5gb", "", mig.ErrNoRoom, "place 1g.5gb beside 3g.20gb, 2g.10gb, 2g.10gb: no room"},
		{"media extensions twice", a100, "2×1g.5gb+me", "", mig.ErrNoRoom, "place 1g.5gb+me beside 1g.5gb+me: no room"},
		{"media extensions in two sizes", a30, "1g.6gb+me 2g.12gb+me", "", mig.ErrNoRoom, "place 1g.6gb+me beside 2g.12gb+me: no room"},
		{"media extensions beside kept ones", a30, "2g.12gb+me", "1g.6gb+me@3:1", mig.ErrNoRoom, "place 2g.12gb+me beside 1g.6gb+me: no room"},
		{"all media beside some", rtxPro6000, "1g.24gb+me.all 1g.24gb", "", mig.ErrNoRoom, "place 1g.24gb beside 1g.24gb+me.all: no room"},
		{"all media beside graphics", rtxPro6000, "1g.24gb+gfx", "2g.48gb+me.all@2:2", mig.ErrNoRoom, "place 1g.24gb+gfx beside 2g.48gb+me.all: no room"},
		{"all media after some", rtxPro6000, "2g.48gb+me.all", "1g.24gb@3:1", mig.ErrNoRoom, "place 2g.48gb+me.all beside 1g.24gb: no room"},
		{"compute instances of too many GPU instances", a100, "2×3c.4g.20gb", "", mig.ErrNoRoom, "place 3c.4g.20gb beside 3c.4g.20gb: no room"},
		{"beside kept ones, not what found room in them", a100, "1c.2g.10gb 1g.5gb", "1c.2g.10gb@0:2 2g.10gb@2:2 3g.20gb@4:4", mig.ErrNoRoom, "place 1g.5gb beside 1c.2g.10gb, 2g.10gb, 3g.20gb: no room"},
		{"unknown profile", a100, "1g.6gb", "", mig.ErrUnknownProfile, "place 1g.6gb: the GPU has no such profile (it has 1g.5gb, "},
		{"kept outside", a100, "1g.5gb", "3g.20gb@6:4", nil, "kept 3g.20gb at 6:4 lies outside the GPU's 8 slots"},
		{"kept without size", a100, "1g.5gb", "3g.20gb@6:0", nil, "kept 3g.20gb at 6:0 lies outside"},
		{"kept before the GPU", a100, "1g.5gb", "3g.20gb@-1:4", nil, "kept 3g.20gb at -1:4 lies outside"},
		{"kept far away", a100, "1g.5gb", "3g.20gb@9223372036854775807:4", nil, "lies outside"},
		{"kept twice", a100, "1g.5gb", "2g.10gb@0:2 2g.10gb@0:2", nil, "kept 2g.10gb at 0:2 overlaps kept 2g.10gb at 0:2"},
		{"kept overlapping", a100, "1g.5gb", "1g.5gb@1:1 2g.10gb@0:2", nil, "kept 1g.5gb at 1:1 overlaps kept 2g.10gb at 0:2"},
		{"kept compute instances shifted", a100, "1g.5gb", "1c.2g.10gb@1:2 1c.2g.10gb@0:2", nil, "kept 1c.2g.10gb at 1:2 overlaps"},
		{"kept compute instances of two kinds", a100, "1g.5gb", "1c.3g.20gb@0:4 1c.4g.20gb@0:4", nil, "kept 1c.4g.20gb at 0:4 overlaps kept 1c.3g.20gb at 0:4"},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := geometry(t, row.gpu).Place(layout(t, row.wanted), placed(t, row.kept))
			if err == nil {
				t.Fatalf("placed as %v", got)
			}
			if !strings.Contains(err.Error(), row.want) {
				t.Errorf("error %q does not say %q", err, row.want)
			}
			if got != nil {
				t.Errorf("returns %v beside the error", got)
			}
			for _, sentinel := range []error{mig.ErrNoRoom, mig.ErrUnknownProfile} {
				if errors.Is(err, sentinel) != errors.Is(sentinel, row.because) {
					t.Errorf("error %q: Is(%q) is %v", err, sentinel, errors.Is(err, sentinel))
				}
			}
		})
	}
}

func TestPlaceRefusesContradictions(t *testing.T) {
	g := geometry(t, a100)
	p := profile(t, "1g.5gb")
	for _, row := range []struct {
		name   string
		wanted mig.Layout
		want   string
	}{
		{"partitions with MIG off", mig.Layout{Partitions: []mig.PartitionCount{{p, 1}}}, "place 1g.5gb: the layout has MIG off"},
		{"negative count", mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{p, -1}}}, "place -1 of 1g.5gb: the count is negative"},
		{"absurd count", mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{p, 1 << 60}}}, "no room"},
	} {
		t.Run(row.name, func(t *testing.T) {
			if got, err := g.Place(row.wanted, nil); err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("placed %v, error %v; want %q", got, err, row.want)
			}
		})
	}
	const want = "place 1g.5gb: the GPU has no such profile"
	if _, err := (mig.Geometry{}).Place(layout(t, "1g.5gb"), nil); err == nil || err.Error() != want {
		t.Errorf("on a GPU without MIG: %v, want %q", err, want)
	}
	for _, off := range []mig.Layout{{}, {Partitions: []mig.PartitionCount{{p, 0}}}} {
		if got, err := g.Place(off, nil); got != nil || err != nil {
			t.Errorf("MIG off places %v, %v", got, err)
		}
	}
}

// Cases that no known GPU has, but a driver may describe: slices that run out before slots, a maximum below the
// number of starts, several attributes.
func TestPlaceOnOtherGPUs(t *testing.T) {
	big := mig.ProfileInfo{Profile: profile(t, "4g.20gb"), Size: 4, Starts: []int{0, 4, 8}, Max: 2}
	extended := mig.ProfileInfo{Profile: profile(t, "1g.5gb+me"), Size: 1, Starts: []int{0, 1, 2, 3}, Max: 1}
	graphic := mig.ProfileInfo{Profile: profile(t, "1g.5gb+gfx,me"), Size: 1, Starts: []int{0, 1, 2, 3}, Max: 1}
	for _, row := range []struct {
		name          string
		slices, slots int
		shapes        []mig.ProfileInfo
		wanted, kept  string
		fits          bool
	}{
		{"slices for one", 7, 8, []mig.ProfileInfo{big}, "4g.20gb", "4g.20gb@0:4", false},
		{"slices for one, kept shape not listed", 7, 8, []mig.ProfileInfo{big}, "4g.20gb", "4g.20gb+new@0:4", false},
		{"slices for two", 8, 8, []mig.ProfileInfo{big}, "4g.20gb", "4g.20gb@0:4", true},
		{"a start past the last slot", 12, 8, []mig.ProfileInfo{big}, "4g.20gb", "4g.20gb@0:4 4g.20gb+new@4:4", false},
		{"a maximum below the starts", 12, 12, []mig.ProfileInfo{big}, "4g.20gb", "4g.20gb@0:4 4g.20gb@4:4", false},
		{"starts for three", 12, 12, []mig.ProfileInfo{big}, "4g.20gb", "4g.20gb@0:4 4g.20gb+new@4:4", true},
		{"media extensions among attributes", 4, 4, []mig.ProfileInfo{graphic, extended}, "1g.5gb+me 1g.5gb+gfx,me", "", false},
	} {
		t.Run(row.name, func(t *testing.T) {
			g := mig.Geometry{Slices: row.slices, Slots: row.slots, Profiles: row.shapes}
			got, err := g.Place(layout(t, row.wanted), placed(t, row.kept))
			if row.fits != (err == nil) || err != nil && !errors.Is(err, mig.ErrNoRoom) {
				t.Errorf("placed %v, error %v", got, err)
			}
		})
	}
}

// On every known GPU the first try succeeds if any does. Here a takes slot 0 first, the only one left for b.
func TestPlaceGoesBack(t *testing.T) {
	a := mig.ProfileInfo{Profile: profile(t, "2g.20gb"), Size: 1, Starts: []int{0, 1}, Max: 1}
	b := mig.ProfileInfo{Profile: profile(t, "2g.10gb"), Size: 1, Starts: []int{0, 2}, Max: 1}
	g := mig.Geometry{Slices: 6, Slots: 3, Profiles: []mig.ProfileInfo{b, a}}
	got, err := g.Place(layout(t, "2g.10gb 2g.20gb"), placed(t, "2g.30gb@2:1"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(placed(t, "2g.10gb@0:1 2g.20gb@1:1"), got); diff != "" {
		t.Errorf("placed (-want +got):\n%s", diff)
	}
}

func TestPlaceDoesNotTouchItsArguments(t *testing.T) {
	g := geometry(t, a100)
	wanted, kept := layout(t, "1g.5gb 1c.2g.10gb"), placed(t, "3g.20gb@4:4 1c.2g.10gb@0:2")
	if _, err := g.Place(wanted, kept); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(layout(t, "1g.5gb 1c.2g.10gb"), wanted); diff != "" {
		t.Errorf("wanted changed:\n%s", diff)
	}
	if diff := cmp.Diff(placed(t, "3g.20gb@4:4 1c.2g.10gb@0:2"), kept); diff != "" {
		t.Errorf("kept changed:\n%s", diff)
	}
	if diff := cmp.Diff(geometry(t, a100), g); diff != "" {
		t.Errorf("geometry changed:\n%s", diff)
	}
}

func BenchmarkPlace(b *testing.B) {
	g := geometry(b, a100)
	for _, row := range []struct{ name, wanted, kept string }{
		{"balanced", "2×1g.5gb 2g.10gb 3g.20gb", ""},
		{"seven", "7×1g.5gb", ""},
		{"around kept", "2g.10gb 1g.5gb", "1g.5gb@0:1 1g.5gb@5:1"},
		{"no room", "4×1g.5gb 1g.5gb+me 2g.10gb 1g.10gb", ""},
	} {
		wanted, kept := layout(b, row.wanted), placed(b, row.kept)
		b.Run(row.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_, _ = g.Place(wanted, kept)
			}
		})
	}
}

// placed reads "2g.10gb@0:2 3g.20gb@4:4"; nil for "".
func placed(t testing.TB, text string) []mig.Partition {
	t.Helper()
	var list []mig.Partition
	for _, word := range strings.Fields(text) {
		name, at, _ := strings.Cut(word, "@")
		p := mig.Partition{Profile: profile(t, name)}
		if _, err := fmt.Sscanf(at, "%d:%d", &p.Placement.Start, &p.Placement.Size); err != nil {
			t.Fatalf("%s: %v", word, err)
		}
		list = append(list, p)
	}
	return list
}

// The tests in this file compare Place with a list of everything legal on a GPU, made by trying every subset of
// (shape, start), without the package's search.

// legalLayouts are all sets of GPU instances that may stand on the GPU
// together, the empty one included, each by start.
func legalLayouts(g mig.Geometry) [][]mig.Partition {
	var candidates []mig.Partition
	for start := range g.Slots {
		for _, s := range g.Profiles {
			if slices.Contains(s.Starts, start) {
				candidates = append(candidates, mig.Partition{
					Profile:   s.Profile,
					Placement: mig.Placement{Start: start, Size: s.Size},
				})
			}
		}
	}
	var all [][]mig.Partition
	var choose func(from int, chosen []mig.Partition)
	choose = func(from int, chosen []mig.Partition) {
		all = append(all, slices.Clone(chosen))
		for i := from; i < len(candidates); i++ {
			if next := append(slices.Clone(chosen), candidates[i]); legal(g, next) {
				choose(i+1, next)
			}
		}
	}
	choose(0, nil)
	return all
}

// legal spells the rules out, slot by slot and instance by instance.
func legal(g mig.Geometry, layout []mig.Partition) bool {
	taken := make([]bool, g.Slots)
	slicesUsed, extensions, everyEngine, someEngine := 0, 0, 0, 0
	counts := map[mig.Profile]int{}
	for _, p := range layout {
		for slot := range p.Placement.Size {
			if taken[p.Placement.Start+slot] {
				return false
			}
			taken[p.Placement.Start+slot] = true
		}
		slicesUsed += p.Profile.Slices
		counts[p.Profile]++
		switch p.Profile.Attributes {
		case "+me":
			extensions++
			someEngine++
		case "+me.all":
			everyEngine++
		case "", "+gfx":
			someEngine++
		}
	}
	for _, s := range g.Profiles {
		if counts[s.Profile] > s.Max {
			return false
		}
	}
	return slicesUsed <= g.Slices && extensions <= 1 && everyEngine <= 1 && (everyEngine == 0 || someEngine == 0)
}

// A 7-slice GPU has 2,319 legal layouts with 128 multisets of profiles, the
// empty one counted: with 1g, 1g+me, 1g with double memory, 2g, 3g, 4g and 7g.
// Without 1g+me there are 723 and 78.
func TestLegalLayoutsOfASevenSliceGPU(t *testing.T) {
	g := geometry(t, a100)
	for _, row := range []struct {
		name              string
		without           string
		layouts, distinct int
	}{
		{"all shapes", "", 2319, 128},
		{"no media extensions", "1g.5gb+me", 723, 78},
	} {
		t.Run(row.name, func(t *testing.T) {
			some := g
			some.Profiles = slices.DeleteFunc(slices.Clone(g.Profiles), func(s mig.ProfileInfo) bool { return s.Profile.String() == row.without })
			layouts := legalLayouts(some)
			distinct := map[string]bool{}
			for _, l := range layouts {
				distinct[multiset(l)] = true
			}
			if len(layouts) != row.layouts || len(distinct) != row.distinct {
				t.Errorf("%d layouts, %d multisets; want %d and %d", len(layouts), len(distinct), row.layouts, row.distinct)
			}
		})
	}
}

func TestPlaceIsExact(t *testing.T) {
	for _, row := range []struct {
		name string
		gpu  uint16
	}{{"A100", a100}, {"A30", a30}, {"RTX PRO 6000", rtxPro6000}} {
		t.Run(row.name, func(t *testing.T) {
			g := geometry(t, row.gpu)
			possible := map[string]bool{}
			for _, l := range legalLayouts(g) {
				possible[multiset(l)] = true
			}
			found := 0
			for _, wanted := range multisets(g) {
				if checkPlace(t, g, wanted, nil, possible[text(wanted)]) {
					found++
				}
			}
			if found != len(possible) {
				t.Errorf("found %d of %d multisets", found, len(possible))
			}
		})
	}
}

// Each legal layout is kept in turn, and every multiset is asked for beside it.
func TestPlaceIsExactAroundKept(t *testing.T) {
	for _, row := range []struct {
		name string
		gpu  uint16
	}{{"A100", a100}, {"A30", a30}} {
		t.Run(row.name, func(t *testing.T) {
			g := geometry(t, row.gpu)
			layouts := legalLayouts(g)
			possible := map[string]bool{}
			for _, whole := range layouts {
				for subset := range 1 << len(whole) {
					var kept, rest []mig.Partition
					for i, p := range whole {
						if subset>>i&1 == 1 {
							kept = append(kept, p)
						} else {
							rest = append(rest, p)
						}
					}
					possible[fmt.Sprint(kept)+multiset(rest)] = true
				}
			}
			all := multisets(g)
			// All of them pass too, in 15 s with the race detector.
			every := 5
			if raceDetector {
				every = 20
			}
			for i, kept := range layouts {
				if i%every != 0 {
					continue
				}
				key := fmt.Sprint(kept)
				for _, wanted := range all {
					if sum(wanted) <= g.Slices-sum(tally(kept))+1 {
						checkPlace(t, g, wanted, kept, possible[key+text(wanted)])
					}
				}
			}
		})
	}
}

// checkPlace asks for wanted beside kept, checks the answer against possible, and reports whether there was one.
func checkPlace(t *testing.T, g mig.Geometry, wanted []mig.PartitionCount, kept []mig.Partition, possible bool) bool {
	t.Helper()
	got, err := g.Place(mig.Layout{MIG: true, Partitions: wanted}, kept)
	switch {
	case err != nil && possible:
		t.Errorf("%s beside %v: %v", text(wanted), kept, err)
	case err == nil && !possible:
		t.Errorf("%s beside %v: placed as %v, though no layout is legal", text(wanted), kept, got)
	case err != nil:
		if !errors.Is(err, mig.ErrNoRoom) || !slices.ContainsFunc(wanted, func(c mig.PartitionCount) bool {
			return strings.HasPrefix(err.Error(), "place "+c.Profile.String())
		}) {
			t.Errorf("%s beside %v: the error names none of them: %v", text(wanted), kept, err)
		}
	default:
		if !legal(g, append(slices.Clone(kept), got...)) {
			t.Errorf("%s beside %v: placed illegally as %v", text(wanted), kept, got)
		}
		if diff := cmp.Diff(text(wanted), multiset(got)); diff != "" {
			t.Errorf("%s beside %v: placed something else (-want +got):\n%s", text(wanted), kept, diff)
		}
		for _, p := range got {
			if shape, _ := g.ProfileInfo(p.Profile); shape.Size != p.Placement.Size || !slices.Contains(shape.Starts, p.Placement.Start) {
				t.Errorf("%s has no placement %s", p.Profile, p.Placement)
			}
		}
	}
	return err == nil
}

// multisets are all choices of 0 to the maximum of each shape, 2 at least, that
// overfill the GPU by no more than a slice.
func multisets(g mig.Geometry) [][]mig.PartitionCount {
	all := [][]mig.PartitionCount{nil}
	for _, s := range g.Profiles {
		for _, sofar := range slices.Clone(all) {
			for n := 1; n <= max(s.Max, 2); n++ {
				more := append(slices.Clone(sofar), mig.PartitionCount{Profile: s.Profile, Count: n})
				if sum(more) <= g.Slices+1 {
					all = append(all, more)
				}
			}
		}
	}
	return all
}

// sum is the number of slices.
func sum(wanted []mig.PartitionCount) int {
	n := 0
	for _, c := range wanted {
		n += c.Count * c.Profile.Slices
	}
	return n
}

func tally(layout []mig.Partition) []mig.PartitionCount {
	counts := map[mig.Profile]int{}
	for _, p := range layout {
		counts[p.Profile]++
	}
	var wanted []mig.PartitionCount
	for p, n := range counts {
		wanted = append(wanted, mig.PartitionCount{Profile: p, Count: n})
	}
	slices.SortFunc(wanted, func(a, b mig.PartitionCount) int { return a.Profile.Compare(b.Profile) })
	return wanted
}

// text is a multiset in the order of the geometry's shapes, which is Compare's.
func text(wanted []mig.PartitionCount) string {
	var b strings.Builder
	for _, c := range wanted {
		fmt.Fprintf(&b, "%d×%s ", c.Count, c.Profile)
	}
	return b.String()
}

func multiset(layout []mig.Partition) string { return text(tally(layout)) }

// TestUnreachable checks which free slots count as lost.
func TestUnreachable(t *testing.T) {
	g, _ := mig.GeometryOf(0x20B0)
	at := func(text string, start, size int) mig.Instance {
		p, err := mig.ParseProfile(text)
		if err != nil {
			t.Fatal(err)
		}
		return mig.Instance{Profile: p, Placement: mig.Placement{Start: start, Size: size}}
	}
	for name, test := range map[string]struct {
		instances []mig.Instance
		want      int
	}{
		"empty": {nil, 0},
		"all that takes the last slot would lie on this 1g": {[]mig.Instance{at("1g.5gb", 6, 1)}, 1},
		"4g and 3g leave nothing":                           {[]mig.Instance{at("4g.20gb", 0, 4), at("3g.20gb", 4, 4)}, 0},
		"seven 1g leave the last one": {slices.Collect(func(yield func(mig.Instance) bool) {
			for start := range 7 {
				if !yield(at("1g.5gb", start, 1)) {
					return
				}
			}
		}), 1},
		"3g and 3g have a slice left and no slot": {[]mig.Instance{at("3g.20gb", 0, 4), at("3g.20gb", 4, 4)}, 0},
	} {
		if got := g.Unreachable(test.instances); got != test.want {
			t.Errorf("%s: %d, want %d", name, got, test.want)
		}
	}
}
