package nvml

import (
	"cmp"
	"slices"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// linkBound ends the enumeration of a driver that never says INVALID_ARGUMENT.
// NVML has 18 NVLinks a board (nvml.h, NVML_NVLINK_MAX_LINKS).
const linkBound = 64

// readLinks counts the board's active NVLinks by the bus ID of the other end. A
// link that cannot be read counts as inactive.
func readLinks(lib Library, device Device) map[string]int {
	links := map[string]int{}
	for link := range linkBound {
		active, err := lib.DeviceGetNvLinkState(device, link)
		if err != nil {
			break
		}
		if !active {
			continue
		}
		if remote, err := lib.DeviceGetNvLinkRemotePciInfo(device, link); err == nil {
			links[strings.ToUpper(remote.BusID)]++
		}
	}
	return links
}

// nvLinks is the number of NVLinks that data between the two boards can use:
// those that lead from one to the other, and through each switch as many as
// both have to it. What is at the other end and none of the boards is a switch.
func nvLinks(a, b *board, boards map[string]bool) int {
	count := a.links[busKey(b)]
	for remote, ofA := range a.links {
		if !boards[remote] {
			count += min(ofA, b.links[remote])
		}
	}
	return count
}

func busKey(b *board) string { return strings.ToUpper(b.fixed.PCIBusID) }

// topology is how the boards are linked. Levels are kept for as long as the
// handles are: the places of boards do not change.
type topology struct {
	lib      Library
	activity *activity
	levels   map[[2]Device]string
}

// connect returns the links of each board to the others, by its UUID.
func (t *topology) connect(boards []*board) map[string][]sharing.Link {
	onBus := map[string]bool{}
	for _, b := range boards {
		onBus[busKey(b)] = true
	}
	before := t.levels
	t.levels = map[[2]Device]string{}
	linked := map[string][]sharing.Link{}
	for _, from := range boards {
		for _, to := range boards {
			if from == to {
				continue
			}
			linked[from.fixed.UUID] = append(linked[from.fixed.UUID], sharing.Link{
				Peer: to.fixed.UUID, NVLinks: nvLinks(from, to, onBus), Level: t.level(from.device, to.device, before),
			})
		}
		slices.SortFunc(linked[from.fixed.UUID], func(a, b sharing.Link) int { return cmp.Compare(a.Peer, b.Peer) })
	}
	return linked
}

// level is the topology level in one word, "" when the driver does not tell.
func (t *topology) level(a, b Device, before map[[2]Device]string) string {
	pair := [2]Device{min(a, b), max(a, b)}
	if level, known := t.levels[pair]; known {
		return level
	}
	if level, known := before[pair]; known {
		t.levels[pair] = level
		return level
	}
	defer t.activity.begin("DeviceGetTopologyCommonAncestor")()
	level := ""
	if answer, err := t.lib.DeviceGetTopologyCommonAncestor(pair[0], pair[1]); err == nil {
		level = answer.String()
	}
	t.levels[pair] = level
	return level
}
