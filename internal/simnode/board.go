package simnode

import (
	"crypto/sha1"
	"fmt"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// normalTemperature is what an untroubled board has, in degrees Celsius.
const normalTemperature = 34

// board is a simulated board. The Node's lock guards it.
type board struct {
	model
	// ordinal is the board's number in the order of creation. It is never used
	// again, and the UUID and the place on the bus follow from it.
	ordinal  int
	uuid     string
	numaNode int
	// geometry has no shapes on a board without MIG.
	geometry mig.Geometry
	// handle is the one that is alive: a reset makes a new one.
	handle  nvml.Device
	lost    bool
	pulled  bool
	celsius int
	// rows and pagesPending are what the board's memory repair says; a board has
	// one or the other.
	rows         nvml.RemappedRows
	pagesPending bool
	// mig is the mode now, migPending the one after the next reset.
	mig, migPending bool
	instances       []*gpuInstance
	// cuts is the number of MIG devices ever made; their UUIDs follow from it.
	cuts      int
	processes []nvml.Process
	work      work
	// slowed is why the clocks are lower than they could be.
	slowed nvml.ClockReasons
}

// newBoard makes the node's next board.
func (n *Node) newBoard(m model, numaNode int) *board {
	geometry, _ := mig.GeometryOf(m.deviceID)
	b := &board{
		model: m, ordinal: n.made, numaNode: numaNode, geometry: geometry,
		uuid:    "GPU-" + nameUUID(fmt.Sprintf("%s/gpu/%d", n.name, n.made)),
		celsius: normalTemperature,
	}
	n.made++
	n.renewHandles(b)
	return b
}

// busID spreads the boards over the bus in the order of their ordinals, so that
// the driver's order, which is that of the bus, is theirs.
func (b *board) busID() string {
	return fmt.Sprintf("%08X:%02X:00.0", b.ordinal/boardsPerDomain, 0x07+0x10*(b.ordinal%boardsPerDomain))
}

const boardsPerDomain = 15

// memory is the board's total memory in bytes.
func (b *board) memory() uint64 { return b.mebibytes << 20 }

// share is the memory of so many memory slots, in bytes. (A real partition has
// a little less, which the driver keeps for itself.)
func (b *board) share(slots int) uint64 {
	return b.mebibytes * uint64(slots) / uint64(b.geometry.Slots) << 20
}

// used is the memory in bytes of all processes on the board.
func (b *board) used() uint64 {
	used := usedBy(b.processes)
	for _, i := range b.instances {
		for _, c := range i.computes {
			used += usedBy(c.processes)
		}
	}
	return used
}

func usedBy(processes []nvml.Process) uint64 {
	var used uint64
	for _, p := range processes {
		if p.Memory != nvml.MemoryUnknown {
			used += p.Memory
		}
	}
	return used
}

// nameUUID is a UUID that follows from the name, in the manner of version 5
// (RFC 9562, section 5.5).
func nameUUID(name string) string {
	sum := sha1.Sum([]byte("virgate/simnode/" + name))
	id := sum[:16]
	id[6] = id[6]&0x0F | 0x50
	id[8] = id[8]&0x3F | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:16])
}
