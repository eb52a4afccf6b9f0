package simnode

import (
	"slices"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// Fault is how a scripted call misbehaves.
type Fault struct {
	// Return is what the call fails with; with nvml.Success it does its work.
	Return nvml.Return
	// Delay is how long the call takes. It holds up no other call.
	Delay time.Duration
	// Skip is how many calls are left alone first.
	Skip int
	// Times is how many calls after those misbehave; 0 for all.
	Times int
}

// script is a Fault in force.
type script struct {
	call string
	// board limits the script to calls for one; nil for any call.
	board *board
	fault Fault
	seen  int
}

// Script makes calls of that name, "DeviceGetUUID", misbehave. Of several
// scripts for a call the first one that is not used up applies. end takes the
// script back; it may be called more than once.
func (n *Node) Script(call string, fault Fault) (end func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.script(&script{call: call, fault: fault})
}

// ScriptGPU is Script for the calls that concern one board or its partitions,
// wherever the board is in the enumeration by then. Heal ends it.
func (n *Node) ScriptGPU(gpu int, call string, fault Fault) (end func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	b, err := n.board(gpu)
	if err != nil {
		return nil, err
	}
	return n.script(&script{call: call, board: b, fault: fault}), nil
}

func (n *Node) script(s *script) (end func()) {
	n.scripts = append(n.scripts, s)
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.scripts = slices.DeleteFunc(n.scripts, func(other *script) bool { return other == s })
	}
}

// Calls is how often a call of that name was made.
func (n *Node) Calls(call string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.calls[call]
}

// scripted is what the call, for the board or for none, must do wrong; the zero
// Fault for nothing.
func (n *Node) scripted(call string, b *board) Fault {
	for _, s := range n.scripts {
		if s.call != call || s.board != nil && s.board != b {
			continue
		}
		s.seen++
		turn := s.seen - s.fault.Skip
		if turn >= 1 && (s.fault.Times == 0 || turn <= s.fault.Times) {
			return s.fault
		}
	}
	return Fault{}
}
