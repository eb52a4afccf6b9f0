package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// way is how a GPU is offered: by which name, and shared or whole.
type way struct {
	resource string
	shared   bool
}

// layout is how many devices each of the node's eight GPUs is to have in each way:
// what a profile says, worked out by hand.
type layout map[way][8]int

// alike gives that many to GPUs from first up to last, last not included.
func alike(count, first, last int) (counts [8]int) {
	for i := first; i < last; i++ {
		counts[i] = count
	}
	return counts
}

// change is what one layout gives a resource more than another, and takes from it.
// To be offered in another way is both.
func change(from, to layout, resource string) (gives, takes bool) {
	for _, shared := range []bool{false, true} {
		w := way{resource, shared}
		for gpu := range to[w] {
			gives = gives || to[w][gpu] > from[w][gpu]
			takes = takes || to[w][gpu] < from[w][gpu]
		}
	}
	return gives, takes
}

// offers is what the node has of the resource at rest, when pods hold so many
// devices of each GPU in each way. What pods hold stays; a GPU is offered in a new
// way when nobody holds it in another.
func (l layout) offers(resource string, held map[way][8]int) (count int64) {
	for gpu := range 8 {
		for _, shared := range []bool{false, true} {
			w := way{resource, shared}
			now := held[w][gpu]
			if !heldOtherwise(held, w, gpu) {
				now = max(now, l[w][gpu])
			}
			count += int64(now)
		}
	}
	return count
}

func heldOtherwise(held map[way][8]int, than way, gpu int) bool {
	for w, counts := range held {
		if w != than && counts[gpu] > 0 {
			return true
		}
	}
	return false
}

// stormProfile is one of the chart's profiles whose number of shares the storm edits.
type stormProfile struct {
	name string
	// shares is the number in the file, edited the other one.
	shares, edited int
	layout         func(shares int) layout
}

var stormProfiles = []stormProfile{
	{"time-slicing-4", 4, 6, func(shares int) layout { return layout{{"nvidia.com/gpu", true}: alike(shares, 0, 8)} }},
	{"time-slicing-10", 10, 7, func(shares int) layout { return layout{{"nvidia.com/gpu", true}: alike(shares, 0, 8)} }},
	{"time-slicing-renamed", 4, 8, func(shares int) layout { return layout{{"nvidia.com/gpu.shared", true}: alike(shares, 0, 8)} }},
	{"side-by-side", 8, 5, func(shares int) layout {
		return layout{{"nvidia.com/gpu.shared", true}: alike(shares, 0, 2), {"nvidia.com/gpu", false}: alike(1, 2, 8)}
	}},
}

// text is the profile with that number of shares.
func (p stormProfile) text(t *testing.T, shares int) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("..", "..", "..", "charts", "virgate", "profiles", p.name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	before := "replicas: " + strconv.Itoa(p.shares)
	if strings.Count(string(content), before) != 1 {
		t.Fatalf("profile %s has not one %q", p.name, before)
	}
	return strings.Replace(string(content), before, "replicas: "+strconv.Itoa(shares), 1)
}
