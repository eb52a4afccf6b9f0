package simnode

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

// Node is a simulated node, and the nvml.Library of its driver. All methods may
// be called from any goroutine.
//
// Methods that name a board take its index in the driver's enumeration at that
// moment; one out of range is an error that tells the range.
type Node struct {
	name string

	mu sync.Mutex
	// boards are by enumeration index; pulled have been taken out of the node.
	boards, pulled []*board
	// made is the number of boards ever made, handles that of handles.
	made    int
	handles uint64
	devices map[nvml.Device]target
	sets    map[nvml.EventSet]*eventSet
	// opened is NVML's count of Init less Shutdown.
	opened  int
	scripts []*script
	calls   map[string]int
	// containers are of the processes that run in one, by PID.
	containers map[int]sharing.Container
	// news is closed, and replaced, when a wait for events may have an answer.
	news chan struct{}
}

var _ nvml.Library = (*Node)(nil)

func newNode(name string) *Node {
	return &Node{
		name:    name,
		devices: map[nvml.Device]target{},
		sets:    map[nvml.EventSet]*eventSet{},
		calls:   map[string]int{},

		containers: map[int]sharing.Container{},
		news:       make(chan struct{}),
	}
}

// Name is the node's name, without the suffix that cuts it.
func (n *Node) Name() string { return n.name }

// Links is the number of NVLinks that data between the two boards can use, 0
// for none and for a board and itself. Boards on an NVSwitch reach each other
// with all of theirs.
func (n *Node) Links(a, b int) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	from, err := n.board(a)
	if err != nil {
		return 0, err
	}
	to, err := n.board(b)
	if err != nil || from == to {
		return 0, err
	}
	return min(from.links, to.links), nil
}

// board is the board at the index.
func (n *Node) board(index int) (*board, error) {
	switch {
	case len(n.boards) == 0:
		return nil, fmt.Errorf("no GPU %d: the node has none", index)
	case index < 0 || index >= len(n.boards):
		return nil, fmt.Errorf("no GPU %d: the node has 0 to %d", index, len(n.boards)-1)
	}
	return n.boards[index], nil
}

// plug puts the board into the enumeration, which goes by the bus.
func (n *Node) plug(b *board) {
	n.boards = append(n.boards, b)
	slices.SortFunc(n.boards, func(a, b *board) int { return cmp.Compare(a.ordinal, b.ordinal) })
}

// handle makes a number that no handle had before.
func (n *Node) handle() uint64 {
	n.handles++
	return n.handles
}

// wake lets the waits for events look again.
func (n *Node) wake() {
	close(n.news)
	n.news = make(chan struct{})
}
