package soak

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

// witness judges every event at the kubelet when it happens. It knows nothing
// of profiles: what it holds is true whatever the profile.
type witness struct {
	boards func() []simnode.Board

	mu sync.Mutex
	// lists are the last that any kubelet has received: health by ID, by resource.
	lists map[string]map[string]bool
	// held are the holders: pod UIDs by ID, by resource.
	held map[string]map[string]map[string]bool
	// streams are those open now, by resource.
	streams map[string]int
	up      bool
	// broken says that the schedule itself has broken connections since calm was
	// last called, and dropped of which resources the kubelet dropped the stream.
	broken  bool
	dropped map[string]bool
	// slow says that the schedule has let the kubelet read slowly since then.
	slow       bool
	violations []string
	counts     counts
}

// counts are for the report.
type counts struct{ lists, streams, grants, removed int }

func newWitness(boards func() []simnode.Board) *witness {
	return &witness{
		boards: boards, lists: map[string]map[string]bool{}, held: map[string]map[string]map[string]bool{},
		streams: map[string]int{}, dropped: map[string]bool{},
	}
}

// disturbed says that the schedule breaks connections from now on; calm that
// whatever ends from now on is the program's doing.
func (w *witness) disturbed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = true
}

func (w *witness) calm() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken, w.slow = false, false
	clear(w.dropped)
}

// slowed says that the kubelet may have lists and ends of streams before it that
// it does not know of yet.
func (w *witness) slowed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.slow = true
}

// take is simkubelet.Options.Witness.
func (w *witness) take(e simkubelet.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch e.Kind {
	case simkubelet.Started:
		w.up = true
	case simkubelet.Stopped:
		w.up = false
	case simkubelet.Registering:
		if w.streams[e.Resource] > 0 && !w.broken {
			w.complain("invariant 1: %s is registered while its stream is open", e.Resource)
		}
	case simkubelet.StreamOpened:
		w.opened(e.Resource)
	case simkubelet.StreamEnded:
		w.streams[e.Resource]--
		excused := w.broken || e.ByKubelet || !w.up || w.dropped[e.Resource]
		if of := w.ofUse(e.Resource); of > 0 && !excused {
			w.complain("invariant 1: the stream of %s ended with %d devices that are Healthy or held", e.Resource, of)
		}
		w.dropped[e.Resource] = w.dropped[e.Resource] || e.ByKubelet
	case simkubelet.Listed:
		w.listed(e)
	case simkubelet.Granted:
		w.granted(e)
	case simkubelet.Freed:
		for _, ids := range w.held {
			for _, pods := range ids {
				delete(pods, e.Pod)
			}
		}
	}
}

// opened holds that a resource has one stream: at the end of another, which may
// be the program's before it, the kubelet would drop this one. The program can
// tell that there is another one by the Healthy devices that the kubelet shows,
// once that has read a list.
func (w *witness) opened(resource string) {
	w.streams[resource]++
	w.counts.streams++
	shown := slices.Contains(slices.Collect(maps.Values(w.lists[resource])), true)
	if w.streams[resource] > 1 && shown && !w.slow {
		w.complain("invariant 4: %s has %d streams, and the end of the older one takes the newer one along", resource, w.streams[resource])
	}
}

// ofUse counts the devices in the resource's last list that are Healthy or held.
// A drained resource may end with others: its last, empty list is not waited for.
func (w *witness) ofUse(resource string) int {
	count := 0
	for id, healthy := range w.lists[resource] {
		if healthy || len(w.held[resource][id]) > 0 {
			count++
		}
	}
	return count
}

func (w *witness) complain(format string, arguments ...any) {
	w.violations = append(w.violations, fmt.Sprintf(format, arguments...))
}

func (w *witness) listed(e simkubelet.Event) {
	w.counts.lists++
	next := map[string]bool{}
	for _, device := range e.Devices {
		if _, twice := next[device.ID]; twice {
			w.complain("the list of %s has %s twice", e.Resource, device.ID)
		}
		next[device.ID] = device.Healthy
	}
	for _, id := range slices.Sorted(maps.Keys(w.lists[e.Resource])) {
		if _, kept := next[id]; kept {
			continue
		}
		w.counts.removed++
		if w.lists[e.Resource][id] {
			w.complain("invariant 6: %s left the list of %s, and was Healthy in the one before", id, e.Resource)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(w.held[e.Resource])) {
		if _, kept := next[id]; !kept && len(w.held[e.Resource][id]) > 0 {
			w.complain("invariant 5: %s left the list of %s, and %d pods hold it", id, e.Resource, len(w.held[e.Resource][id]))
		}
	}
	w.lists[e.Resource] = next
}

func (w *witness) granted(e simkubelet.Event) {
	w.counts.grants++
	ids := w.held[e.Resource]
	if ids == nil {
		ids = map[string]map[string]bool{}
		w.held[e.Resource] = ids
	}
	for _, device := range e.Devices {
		w.judgeGrant(e, device.ID)
		if ids[device.ID] == nil {
			ids[device.ID] = map[string]bool{}
		}
		ids[device.ID][e.Pod] = true
	}
}

// judgeGrant asks who else has the hardware behind a device that a pod was just
// given.
func (w *witness) judgeGrant(e simkubelet.Event, id string) {
	unit, alone := unitOf(id)
	for _, resource := range slices.Sorted(maps.Keys(w.held)) {
		for _, other := range slices.Sorted(maps.Keys(w.held[resource])) {
			otherUnit, otherAlone := unitOf(other)
			pods := maps.Clone(w.held[resource][other])
			delete(pods, e.Pod)
			if len(pods) > 0 && otherUnit == unit && (alone || otherAlone || other == id) {
				w.complain("invariant 7: %s of %s was given to a pod while another has %s of %s", id, e.Resource, other, resource)
			}
		}
	}
	exists := false
	for _, board := range w.boards() {
		exists = exists || board.UUID == unit
		for _, partition := range board.Partitions {
			exists = exists || partition.UUID == unit
			for _, pair := range [][2]string{{board.UUID, partition.UUID}, {partition.UUID, board.UUID}} {
				if unit == pair[0] && w.isHeld(pair[1]) {
					w.complain("invariant 7: %s of %s was given to a pod while %s is held", id, e.Resource, pair[1])
				}
			}
		}
	}
	if !exists {
		w.complain("invariant 9: %s of %s was given to a pod and is not there", id, e.Resource)
	}
}

// unitOf is the unit behind a device, and whether a container has it alone.
func unitOf(id string) (unit string, alone bool) {
	unit, _, shared := strings.Cut(id, "::")
	return unit, !shared
}

// isHeld says that a pod has a device of the unit.
func (w *witness) isHeld(unit string) bool {
	for _, ids := range w.held {
		for id, pods := range ids {
			if of, _ := unitOf(id); of == unit && len(pods) > 0 {
				return true
			}
		}
	}
	return false
}

// check looks for partitions that were destroyed under pods, and returns all
// that was ever complained of.
func (w *witness) check() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	there := map[string]bool{}
	for _, board := range w.boards() {
		there[board.UUID] = true
		for _, partition := range board.Partitions {
			there[partition.UUID] = true
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(w.held)) {
		for _, id := range slices.Sorted(maps.Keys(w.held[resource])) {
			if unit, _ := unitOf(id); len(w.held[resource][id]) > 0 && !there[unit] {
				w.complain("invariant 9: %s was destroyed while %d pods have it", unit, len(w.held[resource][id]))
			}
		}
	}
	return slices.Clone(w.violations)
}

// tally is what was counted so far.
func (w *witness) tally() counts {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts
}
