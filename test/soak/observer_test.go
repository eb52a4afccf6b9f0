package soak

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

// observer checks every event at the kubelet when it happens. It does not know the profile: what it checks
// holds for all profiles.
type observer struct {
	gpus func() []simnode.GPU

	mu sync.Mutex
	// lists are the last lists that any kubelet has received: health by resource and ID.
	lists map[string]map[string]bool
	// grown are the devices of seeGrown, as "resource device".
	grown map[string]bool
	// held are the UIDs of the holding pods, by resource and ID.
	held map[string]map[string]map[string]bool
	// streams counts the open streams by resource.
	streams map[string]int
	up      bool
	// broken is true if the schedule itself has broken connections since the last call of calm. dropped has
	// the resources whose stream the kubelet dropped.
	broken  bool
	dropped map[string]bool
	// slow is true if the schedule has slowed the kubelet's reading since then.
	slow bool
	// reset maps each partition that a scheduled reset has destroyed to its GPU.
	reset      map[string]string
	violations []string
	counts     counts
}

// counts are for the report.
type counts struct{ lists, streams, grants, removed int }

func newObserver(gpus func() []simnode.GPU) *observer {
	return &observer{
		gpus: gpus, lists: map[string]map[string]bool{}, grown: map[string]bool{}, held: map[string]map[string]map[string]bool{},
		streams: map[string]int{}, dropped: map[string]bool{}, reset: map[string]string{},
	}
}

// disturbed notes that the schedule breaks connections from now on. After calm, whatever ends is the
// program's doing.
func (w *observer) disturbed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = true
}

func (w *observer) calm() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken, w.slow = false, false
	clear(w.dropped)
}

// slowed notes that lists and ends of streams may be waiting for the kubelet to read them.
func (w *observer) slowed() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.slow = true
}

// resets notes that the schedule is about to reset the GPU.
func (w *observer) resets(gpu simnode.GPU) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, partition := range gpu.Partitions {
		w.reset[partition.UUID] = gpu.UUID
	}
}

// resetPartitions returns the partitions that such resets have destroyed, with their GPUs.
func (w *observer) resetPartitions() map[string]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.reset)
}

// take is simkubelet.Options.OnEvent.
func (w *observer) take(e simkubelet.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch e.Kind {
	case simkubelet.Started:
		w.up = true
	case simkubelet.Stopped:
		w.up = false
	case simkubelet.RegisterCalled:
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
	case simkubelet.ListReceived:
		w.listed(e)
	case simkubelet.Allocated:
		w.granted(e)
	case simkubelet.PodEnded:
		for _, ids := range w.held {
			for _, pods := range ids {
				delete(pods, e.Pod)
			}
		}
	}
}

// opened checks that a resource has one stream. At the end of another, perhaps of an earlier program, the
// kubelet would drop this one. The program can recognize another stream by the Healthy devices that the
// kubelet shows once it has read a list.
func (w *observer) opened(resource string) {
	w.streams[resource]++
	w.counts.streams++
	shown := slices.Contains(slices.Collect(maps.Values(w.lists[resource])), true)
	if w.streams[resource] > 1 && shown && !w.slow {
		w.complain("invariant 4: %s has %d streams, and the end of the older one takes the newer one along", resource, w.streams[resource])
	}
}

// ofUse counts the devices in the resource's last list that are Healthy or held. A drained resource may end
// with others: it does not wait for its last, empty list.
func (w *observer) ofUse(resource string) int {
	count := 0
	for id, healthy := range w.lists[resource] {
		if healthy || len(w.held[resource][id]) > 0 {
			count++
		}
	}
	return count
}

func (w *observer) complain(format string, arguments ...any) {
	w.violations = append(w.violations, fmt.Sprintf(format, arguments...))
}

func (w *observer) listed(e simkubelet.Event) {
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
	w.seeGrown(e.Resource)
}

func (w *observer) granted(e simkubelet.Event) {
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

// judgeGrant checks which other pods have the hardware behind a device that a pod was just given.
func (w *observer) judgeGrant(e simkubelet.Event, id string) {
	unit, _ := unitOf(id)
	alone := w.isAlone(e.Resource, id)
	for _, resource := range slices.Sorted(maps.Keys(w.held)) {
		for _, other := range slices.Sorted(maps.Keys(w.held[resource])) {
			otherUnit, _ := unitOf(other)
			otherAlone := w.isAlone(resource, other)
			pods := maps.Clone(w.held[resource][other])
			delete(pods, e.Pod)
			if len(pods) > 0 && otherUnit == unit && (alone || otherAlone || other == id || resource != e.Resource) {
				w.complain("invariant 7: %s of %s was given to a pod while another has %s of %s", id, e.Resource, other, resource)
			}
		}
	}
	exists := w.reset[unit] != "" // The program may not know yet.
	for _, gpu := range w.gpus() {
		exists = exists || gpu.UUID == unit
		for _, partition := range gpu.Partitions {
			exists = exists || partition.UUID == unit
			for _, pair := range [][2]string{{gpu.UUID, partition.UUID}, {partition.UUID, gpu.UUID}} {
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

// isAlone reports whether the holder of the device has its unit alone.
func (w *observer) isAlone(resource, id string) bool {
	_, alone := unitOf(id)
	return alone && !w.grown[resource+" "+id]
}

// seeGrown looks for devices of whole units that were listed Healthy together with a share of the unit:
// they count as shares, too, as long as a pod has them.
func (w *observer) seeGrown(resource string) {
	list := w.lists[resource]
	shared := map[string]bool{}
	for id, healthy := range list {
		if unit, alone := unitOf(id); !alone && healthy {
			shared[unit] = true
		}
	}
	for id, healthy := range list {
		if _, alone := unitOf(id); alone && healthy && (shared[id] || len(w.held[resource][id]) == 0) {
			w.grown[resource+" "+id] = shared[id]
		}
	}
}

// unitOf returns the unit behind a device, and whether a container has it alone.
func unitOf(id string) (unit string, alone bool) {
	unit, _, shared := strings.Cut(id, "::")
	return unit, !shared
}

// isHeld reports whether a pod has a device of the unit.
func (w *observer) isHeld(unit string) bool {
	for _, ids := range w.held {
		for id, pods := range ids {
			if of, _ := unitOf(id); of == unit && len(pods) > 0 {
				return true
			}
		}
	}
	return false
}

// check looks for partitions that were destroyed under pods, and returns all complaints so far.
func (w *observer) check() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	there := map[string]bool{}
	for _, gpu := range w.gpus() {
		there[gpu.UUID] = true
		for _, partition := range gpu.Partitions {
			there[partition.UUID] = true
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(w.held)) {
		for _, id := range slices.Sorted(maps.Keys(w.held[resource])) {
			if unit, _ := unitOf(id); len(w.held[resource][id]) > 0 && !there[unit] && w.reset[unit] == "" {
				w.complain("invariant 9: %s was destroyed while %d pods have it", unit, len(w.held[resource][id]))
			}
		}
	}
	return slices.Clone(w.violations)
}

// tally returns the counts so far.
func (w *observer) tally() counts {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts
}

func TestObserver(t *testing.T) {
	list := func(ids ...string) simkubelet.Event {
		e := simkubelet.Event{Kind: simkubelet.ListReceived, Resource: gpuName}
		for _, id := range ids {
			name, sick := strings.CutSuffix(id, " sick")
			e.Devices = append(e.Devices, simkubelet.Device{ID: name, Healthy: !sick})
		}
		return e
	}
	grant := func(pod string, ids ...string) simkubelet.Event {
		e := list(ids...)
		e.Kind, e.Pod = simkubelet.Allocated, pod
		return e
	}
	registered, opened, ended := simkubelet.Event{Kind: simkubelet.RegisterCalled, Resource: gpuName},
		simkubelet.Event{Kind: simkubelet.StreamOpened, Resource: gpuName}, simkubelet.Event{Kind: simkubelet.StreamEnded, Resource: gpuName}
	dropped := ended
	dropped.ByKubelet = true
	renamed := grant("b", "GPU-0::1")
	renamed.Resource = gpuName + ".shared"
	begin := []simkubelet.Event{{Kind: simkubelet.Started}, registered, opened}
	freed := simkubelet.Event{Kind: simkubelet.PodEnded, Pod: "a"}
	tests := []struct {
		name   string
		events []simkubelet.Event
		want   string
	}{
		{"grows and shrinks in two steps", []simkubelet.Event{list("GPU-0::0"), list("GPU-0::0", "GPU-0::1"), list("GPU-0::0", "GPU-0::1 sick"), list("GPU-0::0")}, ""},
		{"drops a Healthy device", []simkubelet.Event{list("GPU-0::0", "GPU-0::1"), list("GPU-0::0")}, "invariant 6: GPU-0::1"},
		{"drops a held device", []simkubelet.Event{list("GPU-0::0"), grant("a", "GPU-0::0"), list("GPU-0::0 sick"), list()}, "invariant 5: GPU-0::0"},
		{"drops one that was held", []simkubelet.Event{list("GPU-0::0"), grant("a", "GPU-0::0"), freed, list("GPU-0::0 sick"), list()}, ""},
		{"names a device twice", []simkubelet.Event{list("GPU-0::0", "GPU-0::0")}, "twice"},
		{"ends a stream", []simkubelet.Event{list("GPU-0"), ended}, "invariant 1: the stream"},
		{"ends the stream of a drained name", []simkubelet.Event{list("GPU-0 sick"), ended}, ""},
		{"ends the stream of a held device", []simkubelet.Event{list("GPU-0"), grant("a", "GPU-0"), list("GPU-0 sick"), ended}, "invariant 1: the stream"},
		{"ends the stream of a name without devices", []simkubelet.Event{list(), ended}, ""},
		{"opens a second stream", []simkubelet.Event{list("GPU-0"), opened}, "invariant 4: nvidia.com/gpu has 2 streams"},
		{"opens a second stream that nobody could foresee", []simkubelet.Event{list("GPU-0 sick"), opened}, ""},
		{"a dropped stream", []simkubelet.Event{list("GPU-0"), dropped, registered, opened}, ""},
		{"registers beside its stream", []simkubelet.Event{list("GPU-0"), registered}, "invariant 1: nvidia.com/gpu is registered"},
		{"one GPU alone for two pods", []simkubelet.Event{grant("a", "GPU-0"), grant("b", "GPU-0")}, "invariant 7"},
		{"shared after alone", []simkubelet.Event{grant("a", "GPU-0"), grant("b", "GPU-0::1")}, "invariant 7"},
		{"shared while one has it alone", []simkubelet.Event{
			list("GPU-0"), grant("a", "GPU-0"), list("GPU-0 sick", "GPU-0::1"), grant("b", "GPU-0::1"),
		}, "invariant 7"},
		{"grown", []simkubelet.Event{
			list("GPU-0"), grant("a", "GPU-0"), list("GPU-0", "GPU-0::1"), list("GPU-0 sick", "GPU-0::1 sick"), grant("b", "GPU-0::1"),
		}, ""},
		{"grown, and alone again", []simkubelet.Event{
			list("GPU-0", "GPU-0::1"), grant("a", "GPU-0::1"), list("GPU-0", "GPU-0::1 sick"), grant("b", "GPU-0"),
		}, "invariant 7"},
		{"shared twice", []simkubelet.Event{grant("a", "GPU-0::0"), grant("b", "GPU-0::1")}, ""},
		{"under two names", []simkubelet.Event{grant("a", "GPU-0::0"), renamed}, "invariant 7"},
		{"alone when the other has ended", []simkubelet.Event{grant("a", "GPU-0::0"), freed, grant("b", "GPU-0")}, ""},
		{"a GPU under a partition", []simkubelet.Event{grant("a", "MIG-0"), grant("b", "GPU-0")}, "invariant 7"},
		{"a partition under a GPU", []simkubelet.Event{grant("a", "GPU-0::0"), grant("b", "MIG-0")}, "invariant 7"},
		{"a partition that is gone", []simkubelet.Event{grant("a", "MIG-9")}, "invariant 9"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newObserver(func() []simnode.GPU {
				return []simnode.GPU{{UUID: "GPU-0", Partitions: []simnode.Partition{{UUID: "MIG-0"}}}}
			})
			for _, e := range append(begin[:len(begin):len(begin)], test.events...) {
				w.take(e)
			}
			got := strings.Join(w.check(), "\n")
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("complaints %q, want %q", got, test.want)
			}
		})
	}
}

// A partition that pods hold must stay, whatever removed it.
func TestObserverOfADestroyedPartition(t *testing.T) {
	gpus := []simnode.GPU{{UUID: "GPU-0", Partitions: []simnode.Partition{{UUID: "MIG-0"}}}}
	w := newObserver(func() []simnode.GPU { return gpus })
	w.take(simkubelet.Event{Kind: simkubelet.Allocated, Resource: gpuName, Pod: "a", Devices: []simkubelet.Device{{ID: "MIG-0"}}})
	if wrong := w.check(); len(wrong) > 0 {
		t.Fatal(wrong)
	}
	gpus[0].Partitions = nil
	if wrong := strings.Join(w.check(), "\n"); !strings.Contains(wrong, "invariant 9: MIG-0 was destroyed") {
		t.Errorf("complaints %q", wrong)
	}
}
