package sharing

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"strings"
	"testing"
)

// boardsMask is a set of boards by index.
type boardsMask uint

func (m boardsMask) size() int { return bits.OnesCount(uint(m)) }

// sums returns the sum of the scores within each set of the fabric's boards.
func (f fabric) sums() []int {
	sums := make([]int, 1<<f.boards)
	for m := range sums[1:] {
		set := boardsMask(m + 1)
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

// prefer asks an index of the fabric's boards.
func (f fabric) prefer(x *Index, resource Resource, available, must boardsMask, size int) boardsMask {
	ids := func(m boardsMask) []string {
		var all []string
		for at, device := range resource.Devices {
			if m&(1<<at) != 0 {
				all = append(all, device.ID)
			}
		}
		return all
	}
	var set boardsMask
	for _, id := range x.Prefer(ids(available), ids(must), size) {
		set |= 1 << x.position[id]
	}
	return set
}

// check compares the answer with all other sets: none has more by the scores of
// NVIDIA's plugin, so whatever set that plugin chooses is not better, and of
// those that have as much none leaves more.
func (f fabric) check(t *testing.T, sums []int, x *Index, resource Resource, available, must boardsMask, size int) {
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

// Every question about nodes with up to 8 boards, and some about larger ones.
func TestPreferIsAsGoodAsTheBestSet(t *testing.T) {
	for _, f := range fabrics() {
		t.Run(f.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(5, 6))
			resource := NewPlan(f.node(), defaults()).Resources[0]
			x := NewIndex(resource.Devices, resource.Units, resource.Policy)
			sums := f.sums()
			all := boardsMask(len(sums) - 1)
			questions := make([]boardsMask, 0, len(sums))
			for m := range sums[1:] {
				questions = append(questions, boardsMask(m+1))
			}
			if f.boards > 8 {
				questions = []boardsMask{all}
				for range 12 {
					questions = append(questions, boardsMask(r.Uint64())&all)
				}
			}
			for _, available := range questions {
				for size := 1; size <= available.size(); size++ {
					f.check(t, sums, x, resource, available, 0, size)
					must := available & boardsMask(r.Uint64()) & boardsMask(r.Uint64())
					if must.size() <= size {
						f.check(t, sums, x, resource, available, must, size)
					}
				}
			}
		})
	}
}

// The examples of docs/placement.md, and others by hand.
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
			x := NewIndex(resource.Devices, resource.Units, resource.Policy)
			mask := func(text string) (m boardsMask) {
				for word := range strings.FieldsSeq(text) {
					var board int
					if _, err := fmt.Sscan(word, &board); err != nil {
						t.Fatal(err)
					}
					m |= 1 << board
				}
				return m
			}
			if got, want := f.prefer(x, resource, mask(test.available), mask(test.must), test.size), mask(test.want); got != want {
				t.Errorf("got %08b, want %08b", got, want)
			}
		})
	}
}
