package soak

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

// rest is a node at one moment, and the state it should reach.
type rest struct {
	wish       wantedProfile
	conditions []condition
	gpus       []simnode.GPU
	kubelet    simkubelet.Snapshot
	// reset maps each partition that a scheduled reset has destroyed to its GPU.
	reset map[string]string
}

// restCheck collects what is not yet right.
type restCheck struct {
	rest
	// health is the health of listed devices, by resource and ID.
	health map[string]map[string]bool
	// held are the IDs that pods hold, by resource.
	held map[string]map[string]bool
	// known are the units that were judged or may be in any state.
	known map[string]bool
	wrong []string
	// blocked are the GPUs whose layout waits for pods.
	blocked []string
}

// judge checks a node that should be at rest.
func judge(r rest) *restCheck {
	j := &restCheck{rest: r, health: map[string]map[string]bool{}, held: map[string]map[string]bool{}, known: map[string]bool{}}
	for name, resource := range r.kubelet.Resources {
		j.health[name] = map[string]bool{}
		for _, device := range resource.Devices {
			j.health[name][device.ID] = device.Healthy
		}
	}
	for _, pod := range r.kubelet.Pods {
		for _, container := range pod.Containers {
			for _, grant := range container.Grants {
				if j.held[grant.Resource] == nil {
					j.held[grant.Resource] = map[string]bool{}
				}
				for _, id := range grant.Devices {
					j.held[grant.Resource][id] = true
				}
			}
		}
	}
	j.streams()
	for ordinal, gpu := range r.gpus {
		j.gpu(ordinal, gpu)
	}
	j.leftovers()
	j.heldAreListed()
	return j
}

// streams checks that a resource with devices has one stream. A name without wanted or held devices needs
// none. Here it is served with an empty list only for stopAfter. On a busy machine that may pass before a
// registration, or before the kubelet reads the list; the kubelet then remembers the devices for five
// minutes.
func (j *restCheck) streams() {
	for _, name := range slices.Sorted(maps.Keys(j.kubelet.Resources)) {
		resource := j.kubelet.Resources[name]
		needed := slices.Contains(j.wish.names(), name) || len(j.held[name]) > 0
		if len(resource.Devices) > 0 && (!resource.Connected || resource.Streams != 1) && (needed || resource.Streams > 0) {
			j.complain("invariant 4: %s has %d streams, connected: %t", name, resource.Streams, resource.Connected)
		}
	}
}

func (j *restCheck) complain(format string, arguments ...any) {
	j.wrong = append(j.wrong, fmt.Sprintf(format, arguments...))
}

func (j *restCheck) gpu(ordinal int, gpu simnode.GPU) {
	units := []string{gpu.UUID}
	for _, partition := range gpu.Partitions {
		units = append(units, partition.UUID)
	}
	for _, unit := range units {
		j.known[unit] = true
	}
	switch j.conditions[ordinal] {
	case doubtful:
		return
	case faulty:
		for _, unit := range units {
			j.withoutHealthy(unit, "its GPU is faulty")
		}
		return
	}
	if ordinal < cuttable && j.wish.layout != "" && !j.isCut(gpu) {
		if !slices.ContainsFunc(units, j.isHeld) {
			j.complain("invariant 9: GPU %d has not come to layout %s: MIG %t, %v", ordinal, j.wish.layout, gpu.MIG, cutInto(gpu))
		}
		j.blocked = append(j.blocked, gpu.UUID)
		j.withoutLeaving(units)
		return
	}
	if gpu.MIG {
		j.withoutHealthy(gpu.UUID, "its GPU has partitions")
		j.withoutLeaving([]string{gpu.UUID})
		for _, partition := range gpu.Partitions {
			j.unit(partition.UUID, j.wish.partition(ordinal, partition.Profile))
		}
		return
	}
	j.unit(gpu.UUID, j.wish.whole(ordinal))
}

// cutInto counts the partitions of a GPU by profile.
func cutInto(gpu simnode.GPU) map[string]int {
	counts := map[string]int{}
	for _, partition := range gpu.Partitions {
		counts[partition.Profile]++
	}
	return counts
}

// isCut reports whether the GPU has the layout's partitions, and MIG mode only if there are any.
func (j *restCheck) isCut(gpu simnode.GPU) bool {
	want := layouts()[j.wish.layout]
	return gpu.MIG == (len(want) > 0) && maps.Equal(cutInto(gpu), want)
}

// unit checks the devices of a sound unit that is to be offered in that mode.
func (j *restCheck) unit(unit string, want sharingMode) {
	healthy, listed, holding := 0, 0, 0
	elsewhere := false
	// When a GPU becomes shared under the name under which a pod has it alone, its device stays: as a
	// share, or as the only device while that pod runs. When the GPU becomes exclusive again, such a share
	// is Unhealthy, and its ID looks like that of a whole GPU.
	grown := want.shared() && j.health[want.resource][unit]
	leaves := func(id string) bool { return !want.shared() && !j.health[want.resource][id] }
	for _, resource := range slices.Sorted(maps.Keys(j.held)) {
		for id := range j.held[resource] {
			of, alone := unitOf(id)
			switch {
			case of != unit:
			case resource != want.resource || want.devices == 0 || !alone && !want.shared() || leaves(id):
				elsewhere = true
			default:
				holding++
			}
		}
	}
	if elsewhere || want.devices == 0 {
		j.withoutHealthy(unit, "a pod holds it in another way, or it is not wanted")
		j.withoutLeaving([]string{unit})
		return
	}
	for _, resource := range slices.Sorted(maps.Keys(j.health)) {
		for _, id := range slices.Sorted(maps.Keys(j.health[resource])) {
			of, alone := unitOf(id)
			switch {
			case of != unit:
			case resource != want.resource || !alone && !want.shared():
				j.complain("%s is still listed by %s, where %s is wanted", id, resource, want.resource)
			default:
				listed++
				if j.health[resource][id] {
					healthy++
				}
				if j.held[resource][id] && !j.health[resource][id] && holding <= want.devices {
					j.complain("invariant 5: %s of %s is held, wanted and Unhealthy", id, resource)
				}
			}
		}
	}
	if grown && listed == 1 && j.held[want.resource][unit] {
		return
	}
	if healthy != want.devices {
		j.complain("invariant 3: %s has %d Healthy devices in %s, want %d", unit, healthy, want.resource, want.devices)
	}
	if most := max(want.devices, holding); listed != most {
		j.complain("%s has %d devices in %s, want %d", unit, listed, want.resource, most)
	}
}

// withoutHealthy checks that no device of the unit is Healthy.
func (j *restCheck) withoutHealthy(unit, because string) {
	for _, resource := range slices.Sorted(maps.Keys(j.health)) {
		for _, id := range slices.Sorted(maps.Keys(j.health[resource])) {
			if of, _ := unitOf(id); of == unit && j.health[resource][id] {
				j.complain("invariant 3: %s of %s is Healthy, and %s", id, resource, because)
			}
		}
	}
}

// withoutLeaving checks that none of the units' devices is on its way out: a device that no pod holds is
// Healthy, or is not listed.
func (j *restCheck) withoutLeaving(units []string) {
	for _, resource := range slices.Sorted(maps.Keys(j.health)) {
		for _, id := range slices.Sorted(maps.Keys(j.health[resource])) {
			if of, _ := unitOf(id); slices.Contains(units, of) && !j.health[resource][id] && !j.held[resource][id] {
				j.complain("%s of %s is still on its way out", id, resource)
			}
		}
	}
}

func (j *restCheck) isHeld(unit string) bool {
	for _, ids := range j.held {
		for id := range ids {
			if of, _ := unitOf(id); of == unit {
				return true
			}
		}
	}
	return false
}

// leftovers checks the devices of partitions that are gone. If a GPU cannot be read, a program that did not
// see its last reset knows only its earlier partitions: these may be listed, but not Healthy.
func (j *restCheck) leftovers() {
	unread := map[string]bool{}
	for _, gpu := range j.gpus {
		unread[gpu.UUID] = gpu.Lost || gpu.Index < 0
	}
	for _, resource := range slices.Sorted(maps.Keys(j.health)) {
		for _, id := range slices.Sorted(maps.Keys(j.health[resource])) {
			unit, _ := unitOf(id)
			switch {
			case j.known[unit], j.held[resource][id]:
			case !unread[j.reset[unit]]:
				j.complain("%s is still listed by %s, and is not there", id, resource)
			case j.health[resource][id]:
				j.complain("invariant 3: %s of %s is Healthy, and its GPU was reset and cannot be read", id, resource)
			}
		}
	}
}

// heldAreListed is invariant 5 from the kubelet's view.
func (j *restCheck) heldAreListed() {
	for _, resource := range slices.Sorted(maps.Keys(j.held)) {
		for _, id := range slices.Sorted(maps.Keys(j.held[resource])) {
			if _, listed := j.health[resource][id]; !listed {
				j.complain("invariant 5: a pod holds %s of %s, which is not listed", id, resource)
			}
		}
	}
}

// documentNames are the profiles in the ConfigMap.
var documentNames = []string{"day", "night", "weekend"}

// anyWish is a random content of a document.
func (s *scheduler) anyWish() wantedProfile {
	w := wantedProfile{byModel: s.one(3), oneOnly: s.one(5)}
	if !s.one(3) {
		w.layout = pick(s.random, slices.Sorted(maps.Keys(layouts()))...)
	}
	names := []string{gpuName, "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-3g.40gb"}
	if w.byModel {
		names = append(names, h100Name)
	}
	for _, name := range names {
		if s.one(2) {
			w.shares = append(w.shares, share{
				resource: name, replicas: 2 + s.random.IntN(3), renamed: s.one(4),
				policy: pick(s.random, "distributed", "packed", "spread"),
			})
		}
	}
	if s.one(5) {
		w.excluded = append(w.excluded, s.random.IntN(gpus))
	}
	return w
}

// write stores a valid document.
func (s *scheduler) write(name string, w wantedProfile) {
	s.edits++
	w.edit = s.edits
	s.change(operation{kind: edit, name: name, wish: &w}, func() { s.documents[name] = &w })
}

// spoil replaces the chosen document by a bad one. If it replaced another, a label that chooses that one
// might be seen first.
func (s *scheduler) spoil() {
	name := s.selected
	s.edits++
	s.change(operation{kind: edit, name: name, text: s.badDocument()}, func() { s.documents[name] = nil })
}

// badForms are documents that every node refuses: a number out of range, an unknown key, an impossible MIG
// profile, an unknown layout, another version, and invalid YAML. Each has its number where the error quotes
// it.
var badForms = []string{
	"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: -%d}]}}\n",
	"flags: {edit%d: true}\n",
	"sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-%dgb, replicas: 2}]}}\n",
	"flags: {migStrategy: mixed}\nmig: {manage: true, config: edit%d}\n",
	"version: edit%d\n",
	"edit%d: {timeSlicing: [\n",
}

func (s *scheduler) badDocument() string { return fmt.Sprintf(pick(s.random, badForms...), s.edits) }

// quotesNumber reports whether the error is about the bad document of that number. The error for invalid
// YAML has no number.
func quotesNumber(err error, number int) bool {
	return strings.Contains(err.Error(), strconv.Itoa(number)) || strings.Contains(err.Error(), "YAML")
}

// change adds an operation on the profile. A rejected one leaves the last good profile in force, so that
// profile must be certain first.
func (s *scheduler) change(o operation, do func()) {
	before := *s
	before.documents = maps.Clone(s.documents)
	_, was := s.wanted()
	do()
	wanted, ok := s.wanted()
	if !ok && (s.cutOff > 0 || !was && s.badDocuments != (o.kind == edit)) {
		*s = before // The profile in force would be uncertain.
		return
	}
	if !ok && !s.awaited {
		after := *s
		*s = before
		s.obey()
		after.out, after.awaited = s.out, true
		*s = after
	}
	s.add(o)
	if !ok {
		// Labels and documents arrive on two separate ways. The next change must not overtake this one, nor
		// may something on the other way make this one look seen.
		s.badDocuments = o.kind == edit
		s.add(operation{kind: obeyed, rejected: true})
	}
	if ok {
		s.awaited = s.awaited && wanted.edit == s.inForce.edit && wanted.layout == s.inForce.layout && wanted.labelled == s.inForce.labelled
		s.inForce = wanted
	}
}

// wanted returns what labels and documents ask for; false when that is invalid.
func (s *scheduler) wanted() (wantedProfile, bool) {
	document := s.documents[s.selected]
	if document == nil {
		return wantedProfile{}, false
	}
	w := *document
	if w.layout != "" && s.layout != "" {
		if _, known := layouts()[s.layout]; !known {
			return wantedProfile{}, false
		}
		w.own, w.layout, w.labelled = w.layout, s.layout, true
	}
	return w, true
}

// obey waits until the profile is in force. While the wanted one is rejected this cannot be seen, but then
// it was waited for before.
func (s *scheduler) obey() {
	s.mend()
	if _, ok := s.wanted(); ok {
		w := s.inForce
		s.add(operation{kind: obeyed, wish: &w, name: s.selected})
	}
	s.awaited = true
}

// badLayout is not the name of a layout of any GPU.
const badLayout = "all-nonsense"

func (s *scheduler) profile() {
	switch n := s.random.IntN(20); {
	case n < 8 && slices.Contains(documentNames, s.selected):
		s.write(s.selected, s.anyWish())
	case n < 10:
		s.write(pick(s.random, documentNames...), s.anyWish())
	case n < 14:
		s.flip(pick(s.random, documentNames...))
	case n < 15:
		s.flip(pick(s.random, "", fmt.Sprintf("missing%d", s.edits)))
	case n < 17:
		value := pick(s.random, "", "all-balanced", "all-1g.10gb", "all-disabled", badLayout)
		s.change(operation{kind: migLabel, text: value}, func() { s.layout = value })
	case slices.Contains(documentNames, s.selected):
		s.spoil()
	}
}

func (s *scheduler) flip(value string) {
	s.change(operation{kind: label, text: value}, func() { s.selected = value })
}

// TestSchedulersDocuments checks that the program takes the documents and labels that the scheduler calls
// good, and refuses the bad ones: the model relies on that.
func TestSchedulersDocuments(t *testing.T) {
	read := func(text string) (configs.SelectedProfile, error) {
		return configs.Documents{"day": text}.Select(configMapName, "day", nil)
	}
	for number := 1; number < 5000; number += 1 + number/20 {
		for _, form := range badForms {
			text := fmt.Sprintf(form, number)
			if _, err := read(text); err == nil {
				t.Fatalf("taken: %s", text)
			} else if !quotesNumber(err, number) {
				t.Fatalf("the error for %q does not say which document it is: %v", text, err)
			}
		}
	}
	s := &scheduler{random: rand.New(rand.NewPCG(1, 1))}
	var uuids []string
	for ordinal := range gpus {
		uuids = append(uuids, fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", ordinal))
	}
	for range 300 {
		w := s.anyWish()
		selected, err := read(w.document(uuids))
		if err != nil {
			t.Fatalf("refused: %s\n%v", w.document(uuids), err)
		}
		if w.layout == "" {
			continue // Labels do not count.
		}
		for name := range layouts() {
			if _, err := selected.SelectMIG(name); err != nil {
				t.Errorf("the layout %s is refused: %v", name, err)
			}
		}
		if _, err := selected.SelectMIG(badLayout); err == nil {
			t.Errorf("the layout %s is taken", badLayout)
		}
	}
}

// The tests below check the model on nodes with one thing wrong.

const (
	first, second, third = "MIG-1", "MIG-2", "MIG-3"
	gpu0, gpu3           = "GPU-0", "GPU-3"
)

// right is a node with one partitioned GPU and one GPU with two shares; a pod holds one share. The other
// GPUs are excluded.
func right() rest {
	devices := func(ids ...string) simkubelet.Resource {
		r := simkubelet.Resource{Connected: true, Streams: 1}
		for _, id := range ids {
			r.Devices = append(r.Devices, simkubelet.Device{ID: id, Healthy: true})
		}
		return r
	}
	return rest{
		wish: wantedProfile{
			layout: "all-3g.40gb", excluded: []int{1, 2, 4},
			shares: []share{{resource: gpuName, replicas: 2}},
		},
		conditions: make([]condition, gpus),
		gpus: []simnode.GPU{
			{UUID: gpu0, MIG: true, Partitions: []simnode.Partition{{UUID: first, Profile: "3g.40gb"}, {UUID: second, Profile: "3g.40gb"}}},
			{UUID: "GPU-1", MIG: true, Partitions: []simnode.Partition{{UUID: "MIG-4", Profile: "3g.40gb"}, {UUID: "MIG-5", Profile: "3g.40gb"}}},
			{UUID: "GPU-2", MIG: true, Partitions: []simnode.Partition{{UUID: "MIG-6", Profile: "3g.40gb"}, {UUID: "MIG-7", Profile: "3g.40gb"}}},
			{UUID: gpu3},
			{UUID: "GPU-4"},
		},
		kubelet: simkubelet.Snapshot{
			Resources: map[string]simkubelet.Resource{
				"nvidia.com/mig-3g.40gb": devices(first, second),
				gpuName:                  devices(gpu3+"::0", gpu3+"::1"),
			},
			Pods: []simkubelet.PodStatus{{Containers: []simkubelet.ContainerStatus{{
				Grants: []simkubelet.Grant{{Resource: gpuName, Devices: []string{gpu3 + "::1"}}},
			}}}},
		},
	}
}

// with changes the devices of a resource.
func (r rest) with(resource string, change func([]simkubelet.Device) []simkubelet.Device) rest {
	next := r.kubelet.Resources[resource]
	next.Devices = change(slices.Clone(next.Devices))
	r.kubelet.Resources[resource] = next
	return r
}

// lost returns a node that has lost a GPU after a reset that the program did not see.
func (r rest) lost() rest {
	r.reset = map[string]string{first: gpu0, second: gpu0, third: gpu0}
	r.conditions[0], r.gpus[0].Lost, r.gpus[0].Partitions = faulty, true, nil
	return r.with("nvidia.com/mig-3g.40gb", func([]simkubelet.Device) []simkubelet.Device { return nil })
}

func TestJudge(t *testing.T) {
	sick := func(at int) func([]simkubelet.Device) []simkubelet.Device {
		return func(devices []simkubelet.Device) []simkubelet.Device {
			devices[at].Healthy = false
			return devices
		}
	}
	without := func(at int) func([]simkubelet.Device) []simkubelet.Device {
		return func(devices []simkubelet.Device) []simkubelet.Device { return slices.Delete(devices, at, at+1) }
	}
	plus := func(id string, healthy bool) func([]simkubelet.Device) []simkubelet.Device {
		return func(devices []simkubelet.Device) []simkubelet.Device {
			return append(devices, simkubelet.Device{ID: id, Healthy: healthy})
		}
	}
	const parts = "nvidia.com/mig-3g.40gb"
	tests := []struct {
		name   string
		change func(r rest) rest
		// want is part of the complaint; empty for none.
		want string
	}{
		{"all right", func(r rest) rest { return r }, ""},
		{"a free share is Unhealthy", func(r rest) rest { return r.with(gpuName, sick(0)) }, "invariant 3: GPU-3 has 1 Healthy"},
		{"a held share is Unhealthy", func(r rest) rest { return r.with(gpuName, sick(1)) }, "invariant 5: GPU-3::1"},
		{"a held share is not listed", func(r rest) rest { return r.with(gpuName, without(1)) }, "invariant 5: a pod holds GPU-3::1"},
		{"a share too many", func(r rest) rest { return r.with(gpuName, plus("GPU-3::2", false)) }, "GPU-3 has 3 devices"},
		{"alone and shared", func(r rest) rest { return r.with(gpuName, plus(gpu3, true)) }, "GPU-3 has 3 Healthy"},
		{"alone, and then a share", func(r rest) rest { return r.with(gpuName, without(0)).with(gpuName, plus(gpu3, true)) }, ""},
		{"alone, and free", func(r rest) rest {
			r.kubelet.Pods = nil
			return r.with(gpuName, without(0)).with(gpuName, without(0)).with(gpuName, plus(gpu3, true))
		}, "GPU-3 has 1 Healthy"},
		{"alone, and held", func(r rest) rest {
			r.kubelet.Pods[0].Containers[0].Grants[0].Devices = []string{gpu3}
			return r.with(gpuName, without(0)).with(gpuName, without(0)).with(gpuName, plus(gpu3, true))
		}, ""},
		{"an excluded GPU is offered", func(r rest) rest { return r.with(gpuName, plus("GPU-4", true)) }, "invariant 3: GPU-4"},
		{"an excluded GPU is on its way", func(r rest) rest { return r.with(gpuName, plus("GPU-4", false)) }, "GPU-4 of nvidia.com/gpu is still on its way out"},
		{"a GPU and its partitions", func(r rest) rest { return r.with(gpuName, plus(gpu0, true)) }, "invariant 3: GPU-0"},
		{"a partition that is gone", func(r rest) rest { return r.with(parts, plus(third, false)) }, "MIG-3 is still listed"},
		{"a partition that a reset has destroyed", func(r rest) rest {
			r.reset = map[string]string{third: gpu0}
			return r.with(parts, plus(third, false))
		}, "MIG-3 is still listed"},
		{"such a one of a GPU that cannot be read", func(r rest) rest { return r.lost().with(parts, plus(third, false)) }, ""},
		{"such a one is Healthy", func(r rest) rest { return r.lost().with(parts, plus(third, true)) }, "invariant 3: MIG-3"},
		{"a partition is missing", func(r rest) rest { return r.with(parts, without(0)) }, "invariant 3: MIG-1 has 0 Healthy"},
		{"a faulty GPU is offered", func(r rest) rest { r.conditions[0] = faulty; return r }, "its GPU is faulty"},
		{"a doubtful GPU may be anything", func(r rest) rest { r.conditions[0] = doubtful; return r.with(parts, sick(0)) }, ""},
		{"another layout", func(r rest) rest { r.wish.layout = "all-balanced"; return r }, "invariant 9: GPU 0 has not come to layout"},
		{"no stream", func(r rest) rest {
			next := r.kubelet.Resources[parts]
			next.Streams = 0
			r.kubelet.Resources[parts] = next
			return r
		}, "invariant 4"},
		{"a name that nobody wants, without a stream", func(r rest) rest {
			r.kubelet.Resources["nvidia.com/old"] = simkubelet.Resource{Devices: []simkubelet.Device{{ID: gpu0}}}
			r.conditions[0] = faulty
			return r.with(parts, func([]simkubelet.Device) []simkubelet.Device { return nil })
		}, ""},
		{"a name that nobody wants and a pod holds, without a stream", func(r rest) rest {
			r.kubelet.Resources["nvidia.com/old"] = simkubelet.Resource{Devices: []simkubelet.Device{{ID: gpu0}}}
			r.conditions[0] = faulty
			r.kubelet.Pods[0].Containers[0].Grants = append(r.kubelet.Pods[0].Containers[0].Grants,
				simkubelet.Grant{Resource: "nvidia.com/old", Devices: []string{gpu0}})
			return r.with(parts, func([]simkubelet.Device) []simkubelet.Device { return nil })
		}, "invariant 4: nvidia.com/old has 0 streams"},
		{"a pod keeps a GPU from its layout", func(r rest) rest {
			r.wish.layout, r.wish.excluded = "all-balanced", nil
			r.conditions[1], r.conditions[2], r.conditions[4] = doubtful, doubtful, doubtful
			r.kubelet.Pods[0].Containers[0].Grants = append(r.kubelet.Pods[0].Containers[0].Grants,
				simkubelet.Grant{Resource: parts, Devices: []string{first}})
			return r
		}, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := strings.Join(judge(test.change(right())).wrong, "\n")
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("complaints %q, want %q", got, test.want)
			}
		})
	}
}

func TestStill(t *testing.T) {
	made := func(plan string, restless ...string) settledNode {
		s := settledNode{lists: map[string][]string{gpu0: {"a"}, gpu3: {"b"}}, plan: plan, restless: map[string]bool{}}
		for _, gpu := range restless {
			s.restless[gpu] = true
		}
		return s
	}
	other := func(s settledNode, gpu string) settledNode {
		s.lists[gpu] = append(s.lists[gpu], "c")
		return s
	}
	tests := []struct {
		name          string
		before, after settledNode
		differ        bool
	}{
		{"the same", made("x"), made("x"), false},
		{"another plan", made("x"), made("y"), true},
		{"another list", made("x"), other(made("x"), gpu0), true},
		{"another list of a restless GPU", made("", gpu0), other(made("", gpu0), gpu0), false},
		{"of one that was restless", made("", gpu0), other(made("x"), gpu0), false},
		{"of one that has become restless", made("x"), other(made("", gpu0), gpu0), false},
		{"of another one", made("", gpu0), other(made("", gpu0), gpu3), true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if diff := test.before.differ(test.after); (diff != "") != test.differ {
				t.Errorf("differs: %q", diff)
			}
		})
	}
}
