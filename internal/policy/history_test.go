package policy

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
)

// TestAnySequenceOfChanges: whatever happens to label and ConfigMap, the profile
// in force ends as the choice over the last state, and what came into force on
// the way were right choices, in order: each for a label and a ConfigMap that
// were there, neither older than the one before. (The two have no common order:
// a node may see the one change before the other.)
func TestAnySequenceOfChanges(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			h := &history{site: newSite(t, func(n *Node) { n.Fallbacks = []Fallback{Named, Single} }), random: rand.New(rand.NewPCG(seed, 1))}
			h.labels, h.shelves = []*string{nil}, []configs.Documents{nil}
			h.run()
			for range 60 {
				h.change()
			}
			label := "a"
			h.setLabel(&label)
			last := h.setShelf(configs.Documents{"a": h.unique()})
			h.await(generation(t, last["a"]), "")
			h.stop()
			h.judge()
		})
	}
}

// history is what happened to label and ConfigMap, from the beginning.
type history struct {
	*site
	random  *rand.Rand
	labels  []*string
	shelves []configs.Documents
	made    int
}

// unique is a document that was never there before.
func (h *history) unique() string {
	h.made++
	return strings.Replace(four, "4", fmt.Sprint(h.made), 1)
}

func (h *history) setLabel(value *string) {
	h.labels = append(h.labels, value)
	if value == nil {
		h.nodes.change("n1", nil)
		return
	}
	h.nodes.change("n1", fakeNode("n1", *value))
}

func (h *history) setShelf(shelf configs.Documents) configs.Documents {
	h.shelves = append(h.shelves, shelf)
	if shelf == nil {
		h.maps.change("profiles", nil)
	} else {
		h.maps.change("profiles", fakeConfigMap(shelf))
	}
	return shelf
}

func (h *history) change() {
	names := []string{"", "a", "b", "default"}
	switch h.random.IntN(18) {
	case 0:
		h.setLabel(nil)
	case 1:
		h.setShelf(nil)
	case 2:
		h.nodes.expire()
	case 3:
		h.maps.expire()
	case 16:
		h.nodes.drop()
	case 17:
		h.maps.drop()
	case 4, 5, 6, 7, 8:
		label := names[h.random.IntN(len(names))]
		h.setLabel(&label)
	default:
		shelf := configs.Documents{}
		for _, name := range names[1:] {
			switch h.random.IntN(4) {
			case 0:
			case 1:
				shelf[name] = "{broken"
			default:
				shelf[name] = h.unique()
			}
		}
		h.setShelf(shelf)
	}
	// Some changes come one by one, others at once.
	if h.random.IntN(3) == 0 {
		<-time.After(time.Duration(h.random.IntN(5)) * time.Millisecond)
	}
}

// judge finds for each profile that came into force when it was right.
func (h *history) judge() {
	label, shelf := 0, 0
	for step, applied := range h.applied {
		name, from := "", -1
		for i := shelf; i < len(h.shelves) && from < 0; i++ {
			for _, candidate := range h.shelves[i].Profiles() {
				if selected, err := h.shelves[i].Select("", candidate, nil); err == nil && selected.Generation == applied {
					name, from = candidate, i
				}
			}
		}
		if from < 0 {
			h.t.Fatalf("step %d: %s was in no ConfigMap since number %d", step, applied, shelf)
		}
		shelf = from
		for ; ; label++ {
			if label == len(h.labels) {
				h.t.Fatalf("step %d: %s was wanted by no later label", step, name)
			}
			if h.labels[label] == nil {
				continue
			}
			wish := Wish{Label: *h.labels[label], Fallbacks: h.policy.Fallbacks, Names: h.shelves[shelf].Profiles()}
			if chosen, err := Choose(wish); err == nil && chosen == name {
				break
			}
		}
	}
}
