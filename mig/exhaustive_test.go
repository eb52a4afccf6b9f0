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

// The tests in this file hold Place against a list of everything that is legal
// on a board, made by trying every subset of (shape, start), without a line of
// the package's search.

// legalLayouts are all sets of GPU instances that may stand on the board
// together, the empty one included, each by start.
func legalLayouts(g mig.Geometry) [][]mig.Placed {
	var candidates []mig.Placed
	for start := range g.Slots {
		for _, s := range g.Shapes {
			if slices.Contains(s.Starts, start) {
				candidates = append(candidates, mig.Placed{
					Profile:   s.Profile,
					Placement: mig.Placement{Start: start, Size: s.Size},
				})
			}
		}
	}
	var all [][]mig.Placed
	var choose func(from int, chosen []mig.Placed)
	choose = func(from int, chosen []mig.Placed) {
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
func legal(g mig.Geometry, layout []mig.Placed) bool {
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
	for _, s := range g.Shapes {
		if counts[s.Profile] > s.Max {
			return false
		}
	}
	return slicesUsed <= g.Slices && extensions <= 1 && everyEngine <= 1 && (everyEngine == 0 || someEngine == 0)
}

// A 7-slice board has 2,319 legal layouts with 128 multisets of profiles, the
// empty one counted: with 1g, 1g+me, 1g with double memory, 2g, 3g, 4g and 7g.
// Without 1g+me there are 723 and 78.
func TestLegalLayoutsOfASevenSliceBoard(t *testing.T) {
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
			some.Shapes = slices.DeleteFunc(slices.Clone(g.Shapes), func(s mig.Shape) bool { return s.Profile.String() == row.without })
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
		name  string
		board uint16
	}{{"A100", a100}, {"A30", a30}, {"RTX PRO 6000", rtxPro6000}} {
		t.Run(row.name, func(t *testing.T) {
			g := geometry(t, row.board)
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

// Legal layouts are kept in turn, and every multiset is asked for beside each.
func TestPlaceIsExactAroundKept(t *testing.T) {
	for _, row := range []struct {
		name  string
		board uint16
	}{{"A100", a100}, {"A30", a30}} {
		t.Run(row.name, func(t *testing.T) {
			g := geometry(t, row.board)
			layouts := legalLayouts(g)
			possible := map[string]bool{}
			for _, whole := range layouts {
				for subset := range 1 << len(whole) {
					var kept, rest []mig.Placed
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

// checkPlace asks for wanted beside kept, holds the answer against what is
// possible and says whether there was one.
func checkPlace(t *testing.T, g mig.Geometry, wanted []mig.Count, kept []mig.Placed, possible bool) bool {
	t.Helper()
	got, err := g.Place(mig.Layout{MIG: true, Partitions: wanted}, kept)
	switch {
	case err != nil && possible:
		t.Errorf("%s beside %v: %v", text(wanted), kept, err)
	case err == nil && !possible:
		t.Errorf("%s beside %v: placed as %v, though no layout is legal", text(wanted), kept, got)
	case err != nil:
		if !errors.Is(err, mig.ErrNoRoom) || !slices.ContainsFunc(wanted, func(c mig.Count) bool {
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
			if shape, _ := g.Shape(p.Profile); shape.Size != p.Placement.Size || !slices.Contains(shape.Starts, p.Placement.Start) {
				t.Errorf("%s has no placement %s", p.Profile, p.Placement)
			}
		}
	}
	return err == nil
}

// multisets are all choices of 0 to the maximum of each shape, 2 at least, that
// overfill the board by no more than a slice.
func multisets(g mig.Geometry) [][]mig.Count {
	all := [][]mig.Count{nil}
	for _, s := range g.Shapes {
		for _, sofar := range slices.Clone(all) {
			for n := 1; n <= max(s.Max, 2); n++ {
				more := append(slices.Clone(sofar), mig.Count{Profile: s.Profile, Count: n})
				if sum(more) <= g.Slices+1 {
					all = append(all, more)
				}
			}
		}
	}
	return all
}

// sum is the number of slices.
func sum(wanted []mig.Count) int {
	n := 0
	for _, c := range wanted {
		n += c.Count * c.Profile.Slices
	}
	return n
}

func tally(layout []mig.Placed) []mig.Count {
	counts := map[mig.Profile]int{}
	for _, p := range layout {
		counts[p.Profile]++
	}
	var wanted []mig.Count
	for p, n := range counts {
		wanted = append(wanted, mig.Count{Profile: p, Count: n})
	}
	slices.SortFunc(wanted, func(a, b mig.Count) int { return mig.Compare(a.Profile, b.Profile) })
	return wanted
}

// text is a multiset in the order of the geometry's shapes, which is Compare's.
func text(wanted []mig.Count) string {
	var b strings.Builder
	for _, c := range wanted {
		fmt.Fprintf(&b, "%d×%s ", c.Count, c.Profile)
	}
	return b.String()
}

func multiset(layout []mig.Placed) string { return text(tally(layout)) }
