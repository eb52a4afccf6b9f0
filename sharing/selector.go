package sharing

import (
	"fmt"
	"strconv"
	"strings"
)

// Selector names a board or a partition in a profile. The grammar has what
// NVIDIA's device plugin takes in a devices list (api/config/v1/replicas.go)
// and the PCI bus ID:
//
//	0                         the board with this driver index
//	GPU-<uuid>                the board with this UUID
//	00000000:3B:00.0          the board with this PCI bus ID; a domain of four
//	                          digits, as lspci prints it, means the same
//	0:1                       the partition with MIG device index 1 on board 0
//	MIG-<uuid>                the partition with this UUID
//	MIG-GPU-<uuid>/<gi>/<ci>  the partition with these instances on that board,
//	                          as drivers before R470 named it
//
// Hexadecimal digits may be in either case. Selectors are comparable: two that
// name a thing in the same way are equal however they were written. The zero
// Selector selects nothing.
type Selector struct {
	kind selectorKind
	// name is the UUID or the bus ID, normalised; empty where indexes name it.
	name string
	// first and second are the board's and the MIG device's index, or the GPU
	// and compute instance ID.
	first, second int
}

type selectorKind uint8

const (
	byNothing selectorKind = iota
	byGPUIndex
	byGPUUUID
	byPCIBusID
	byMIGIndex
	byMIGUUID
	byInstances
)

// ParseSelector reads a selector. The error quotes s and says what would have
// been accepted.
func ParseSelector(s string) (Selector, error) {
	for _, parse := range [...]func(string) (Selector, bool){
		parseIndexes, parseUUIDs, parseBusID,
	} {
		if selector, ok := parse(s); ok {
			return selector, nil
		}
	}
	return Selector{}, fmt.Errorf("%q names no GPU or partition: want a GPU index (0), a MIG index (0:1), "+
		"a UUID (GPU-…, MIG-…) or a PCI bus ID (00000000:3B:00.0)", s)
}

// String is the selector in its normal form, which ParseSelector reads back to
// an equal one. It is empty for the zero Selector.
func (s Selector) String() string {
	switch s.kind {
	case byGPUIndex:
		return strconv.Itoa(s.first)
	case byMIGIndex:
		return fmt.Sprintf("%d:%d", s.first, s.second)
	case byInstances:
		return fmt.Sprintf("MIG-%s/%d/%d", s.name, s.first, s.second)
	default:
		return s.name
	}
}

// MatchGPU says that the selector names the board.
func (s Selector) MatchGPU(g GPU) bool {
	switch s.kind {
	case byGPUIndex:
		return g.Index == s.first
	case byGPUUUID:
		return strings.EqualFold(g.UUID, s.name)
	case byPCIBusID:
		id, ok := normalBusID(g.PCIBusID)
		return ok && id == s.name
	default:
		return false
	}
}

// MatchPartition says that the selector names partition p of board g. One that
// names the board names all of its partitions.
func (s Selector) MatchPartition(g GPU, p Partition) bool {
	switch s.kind {
	case byMIGIndex:
		return g.Index == s.first && p.Index == s.second
	case byMIGUUID:
		return strings.EqualFold(p.UUID, s.name)
	case byInstances:
		return strings.EqualFold(g.UUID, s.name) && p.GI == s.first && p.CI == s.second
	default:
		return s.MatchGPU(g)
	}
}
