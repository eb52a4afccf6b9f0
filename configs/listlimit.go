package configs

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// A document knows no node, so the length of a list is judged on the largest
// node that is built: 16 boards (DGX-2), each cut into 7 partitions.
const (
	boardsPerNode      = 16
	partitionsPerBoard = 7
)

// listLimit judges the entries of a profile.
type listLimit struct {
	// single says that partitions have the names of GPUs.
	single bool
	// partitions are the names that resources gives to partitions.
	partitions map[string]bool
}

func newListLimit(profile sharing.Profile) listLimit {
	limit := listLimit{single: profile.MIGStrategy == sharing.MIGSingle, partitions: make(map[string]bool)}
	for _, naming := range profile.MIGNames {
		limit.partitions[naming.Name] = true
	}
	return limit
}

// report reports the entries through which a resource could have more devices
// than the kubelet takes in one list.
func (l listLimit) report(entries []sharedEntry) {
	offered := make(map[string][]sharedEntry)
	var names []string
	for _, e := range entries {
		name := e.offeredAs()
		if offered[name] == nil {
			names = append(names, name)
		}
		offered[name] = append(offered[name], e)
	}
	for _, name := range names {
		l.reportName(name, offered[name])
	}
}

// reportName gives the units of the largest node to the entries of one offered
// name, most replicas first, which is the worst that can happen.
func (l listLimit) reportName(name string, entries []sharedEntry) {
	entries = slices.Clone(entries)
	slices.SortStableFunc(entries, func(a, b sharedEntry) int { return cmp.Compare(b.share.Replicas, a.share.Replicas) })
	units := boardsPerNode
	if slices.ContainsFunc(entries, func(e sharedEntry) bool { return l.unitsPerBoard(e.share.Resource) > 1 }) {
		units *= partitionsPerBoard
	}
	left, devices := units, 0
	for _, e := range entries {
		taken := min(left, l.atMost(e.share))
		left -= taken
		// The replicas alone can be too many, and their product overflow.
		if e.share.Replicas > sharing.MostDevices || devices+taken*e.share.Replicas > sharing.MostDevices {
			e.replicas.problem(fmt.Sprintf(
				"a node of %d units could have more than %d devices of %s, and the kubelet takes no list beyond 4 MiB: at most %d replicas are safe here",
				units, sharing.MostDevices, name, (sharing.MostDevices-devices)/max(taken, 1)))
			return
		}
		devices += taken * e.share.Replicas
	}
}

// atMost is the number of units that the share can have on one node. A selector
// can be a board, and then has all of its partitions.
func (l listLimit) atMost(s sharing.Share) int {
	switch {
	case s.Select.Count > 0:
		return s.Select.Count
	case s.Select.All():
		return boardsPerNode * l.unitsPerBoard(s.Resource)
	default:
		return len(s.Select.List) * l.unitsPerBoard(s.Resource)
	}
}

// unitsPerBoard is more than 1 for a resource whose units can be partitions.
func (l listLimit) unitsPerBoard(resource string) int {
	if l.single || l.partitions[resource] || namesPartition(resource) {
		return partitionsPerBoard
	}
	return 1
}
