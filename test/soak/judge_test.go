package soak

import (
	"fmt"
	"maps"
	"slices"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

// rest is a node at one moment, and what it should come to.
type rest struct {
	wish       wish
	conditions []condition
	boards     []simnode.Board
	kubelet    simkubelet.Snapshot
}

// judgement is what is not yet as it should be.
type judgement struct {
	rest
	// health is by ID, by resource, of what is listed.
	health map[string]map[string]bool
	// held are the IDs that pods hold, by resource.
	held map[string]map[string]bool
	// known are the units that were judged or may be anything.
	known map[string]bool
	wrong []string
	// blocked are the boards that pods keep from their layout.
	blocked []string
}

// judge says what is not as it should be when all has come to rest.
func judge(r rest) *judgement {
	j := &judgement{rest: r, health: map[string]map[string]bool{}, held: map[string]map[string]bool{}, known: map[string]bool{}}
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
	for ordinal, board := range r.boards {
		j.board(ordinal, board)
	}
	j.leftovers()
	j.heldAreListed()
	return j
}

// streams holds that what has devices has one stream. A name that nobody wants
// and whose devices nobody holds needs none. It is served with an empty list for
// only stopAfter here, which on a busy machine may pass before a registration, or
// before the kubelet reads the list; it then remembers the devices for five
// minutes.
func (j *judgement) streams() {
	for _, name := range slices.Sorted(maps.Keys(j.kubelet.Resources)) {
		resource := j.kubelet.Resources[name]
		needed := slices.Contains(j.wish.names(), name) || len(j.held[name]) > 0
		if len(resource.Devices) > 0 && (!resource.Connected || resource.Streams != 1) && (needed || resource.Streams > 0) {
			j.complain("invariant 4: %s has %d streams, connected: %t", name, resource.Streams, resource.Connected)
		}
	}
}

func (j *judgement) complain(format string, arguments ...any) {
	j.wrong = append(j.wrong, fmt.Sprintf(format, arguments...))
}

func (j *judgement) board(ordinal int, board simnode.Board) {
	units := []string{board.UUID}
	for _, partition := range board.Partitions {
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
			j.withoutHealthy(unit, "its board is faulty")
		}
		return
	}
	if ordinal < cuttable && j.wish.layout != "" && !j.isCut(board) {
		if !slices.ContainsFunc(units, j.isHeld) {
			j.complain("invariant 9: board %d has not come to layout %s: MIG %t, %v", ordinal, j.wish.layout, board.MIG, cutInto(board))
		}
		j.blocked = append(j.blocked, board.UUID)
		j.withoutLeaving(units)
		return
	}
	if board.MIG {
		j.withoutHealthy(board.UUID, "its board has partitions")
		j.withoutLeaving([]string{board.UUID})
		for _, partition := range board.Partitions {
			j.unit(partition.UUID, j.wish.partition(ordinal, partition.Profile))
		}
		return
	}
	j.unit(board.UUID, j.wish.whole(ordinal))
}

// cutInto counts the partitions of a board by profile.
func cutInto(board simnode.Board) map[string]int {
	counts := map[string]int{}
	for _, partition := range board.Partitions {
		counts[partition.Profile]++
	}
	return counts
}

// isCut says that the board has the layout's partitions, and MIG mode only for
// them.
func (j *judgement) isCut(board simnode.Board) bool {
	want := layouts()[j.wish.layout]
	return board.MIG == (len(want) > 0) && maps.Equal(cutInto(board), want)
}

// unit judges the devices of a sound unit that is to be offered in that way.
func (j *judgement) unit(unit string, want way) {
	healthy, listed, holding := 0, 0, 0
	elsewhere := false
	for _, resource := range slices.Sorted(maps.Keys(j.held)) {
		for id := range j.held[resource] {
			of, alone := unitOf(id)
			switch {
			case of != unit:
			case resource != want.resource || want.devices == 0 || alone == want.shared():
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
			case resource != want.resource || alone == want.shared():
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
	if healthy != want.devices {
		j.complain("invariant 3: %s has %d Healthy devices in %s, want %d", unit, healthy, want.resource, want.devices)
	}
	if most := max(want.devices, holding); listed != most {
		j.complain("%s has %d devices in %s, want %d", unit, listed, want.resource, most)
	}
}

// withoutHealthy says that nothing of the unit may be handed out.
func (j *judgement) withoutHealthy(unit, because string) {
	for _, resource := range slices.Sorted(maps.Keys(j.health)) {
		for _, id := range slices.Sorted(maps.Keys(j.health[resource])) {
			if of, _ := unitOf(id); of == unit && j.health[resource][id] {
				j.complain("invariant 3: %s of %s is Healthy, and %s", id, resource, because)
			}
		}
	}
}

// withoutLeaving says that nothing of the units is on its way out: what nobody
// holds is Healthy, or is not listed.
func (j *judgement) withoutLeaving(units []string) {
	for _, resource := range slices.Sorted(maps.Keys(j.health)) {
		for _, id := range slices.Sorted(maps.Keys(j.health[resource])) {
			if of, _ := unitOf(id); slices.Contains(units, of) && !j.health[resource][id] && !j.held[resource][id] {
				j.complain("%s of %s is still on its way out", id, resource)
			}
		}
	}
}

func (j *judgement) isHeld(unit string) bool {
	for _, ids := range j.held {
		for id := range ids {
			if of, _ := unitOf(id); of == unit {
				return true
			}
		}
	}
	return false
}

// leftovers are devices of partitions that are gone.
func (j *judgement) leftovers() {
	for _, resource := range slices.Sorted(maps.Keys(j.health)) {
		for _, id := range slices.Sorted(maps.Keys(j.health[resource])) {
			if unit, _ := unitOf(id); !j.known[unit] && !j.held[resource][id] {
				j.complain("%s is still listed by %s, and is not there", id, resource)
			}
		}
	}
}

// heldAreListed is invariant 5 as the kubelet sees it.
func (j *judgement) heldAreListed() {
	for _, resource := range slices.Sorted(maps.Keys(j.held)) {
		for _, id := range slices.Sorted(maps.Keys(j.held[resource])) {
			if _, listed := j.health[resource][id]; !listed {
				j.complain("invariant 5: a pod holds %s of %s, which is not listed", id, resource)
			}
		}
	}
}
