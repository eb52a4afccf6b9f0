package simnode

import (
	"slices"

	"github.com/virgate/virgate/internal/nvml"
)

// XID lets the board report that error, as an event to whoever registered for
// it; it has no other effect. gi and ci name a GPU instance and a compute
// instance of the board, or are nvml.WholeBoard.
func (n *Node) XID(gpu int, code uint64, gi, ci uint32) error {
	return n.change(gpu, func(b *board) {
		n.happen(b, nvml.Event{Type: nvml.EventXIDCritical, Data: code, GI: gi, CI: ci})
	})
}

// ECC lets the board report a memory error, either a double-bit one or one of a
// single bit, which it could correct.
func (n *Node) ECC(gpu int, double bool) error {
	kind := nvml.EventSingleBitECC
	if double {
		kind = nvml.EventDoubleBitECC
	}
	return n.change(gpu, func(b *board) {
		n.happen(b, nvml.Event{Type: kind, GI: nvml.WholeBoard, CI: nvml.WholeBoard})
	})
}

// Repair lets the board say that a repair of its memory waits for a reset: of a
// row from Ampere on, of a page before.
func (n *Node) Repair(gpu int) error {
	return n.change(gpu, func(b *board) {
		if b.architecture >= nvml.Ampere {
			b.rows.Pending = true
			return
		}
		b.pagesPending = true
	})
}

// Lose lets the board fall off the bus: it is still counted, and every call for
// it or for its partitions is GPU_IS_LOST.
func (n *Node) Lose(gpu int) error {
	return n.change(gpu, func(b *board) {
		b.lost = true
		n.wake()
	})
}

// Heal resets the board: it answers again, but only to handles obtained from
// now on, its temperature is normal, its memory repaired, its processes are gone,
// a pending MIG mode is in force, and scripts of ScriptGPU for it have ended. As
// with a real reset nobody is told.
//
// Unlike after a real reset, the partitions are there again with their UUIDs.
func (n *Node) Heal(gpu int) error {
	return n.change(gpu, n.reset)
}

// reset is what Heal says.
func (n *Node) reset(b *board) {
	b.lost = false
	b.celsius = normalTemperature
	b.repair()
	b.mig = b.migPending
	b.processes, b.work, b.slowed = nil, work{}, 0
	for _, i := range b.instances {
		for _, c := range i.computes {
			c.processes = nil
		}
	}
	n.scripts = slices.DeleteFunc(n.scripts, func(s *script) bool { return s.board == b })
	n.renewHandles(b)
}

// Temperature is what the board's core has from now on, in degrees Celsius.
func (n *Node) Temperature(gpu, celsius int) error {
	return n.change(gpu, func(b *board) { b.celsius = celsius })
}

// Remove pulls the board out of the node: it is no longer counted, the boards
// after it move up, and its handles are GPU_IS_LOST.
func (n *Node) Remove(gpu int) error {
	return n.change(gpu, func(b *board) {
		b.pulled = true
		n.boards = append(n.boards[:gpu:gpu], n.boards[gpu+1:]...)
		n.pulled = append(n.pulled, b)
		n.wake()
	})
}

// change changes the board.
func (n *Node) change(gpu int, change func(*board)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	b, err := n.board(gpu)
	if err != nil {
		return err
	}
	change(b)
	return nil
}
