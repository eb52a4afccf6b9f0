package simnode

import (
	"fmt"
	"slices"
)

// Add plugs a board into the node and returns its index: a new one of the
// model, or, when model is empty, the board that was removed last, in its old
// place and reset.
func (n *Node) Add(model string) (gpu int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	b, err := n.spare(model)
	if err != nil {
		return 0, err
	}
	n.plug(b)
	return slices.Index(n.boards, b), nil
}

// spare is the board to plug in.
func (n *Node) spare(key string) (*board, error) {
	if key == "" {
		last := len(n.pulled) - 1
		if last < 0 {
			return nil, fmt.Errorf("no GPU was removed that could be added again; to add a new one, name a model: %s", modelKeys())
		}
		b := n.pulled[last]
		n.pulled = n.pulled[:last]
		b.pulled = false
		n.reset(b)
		return b, nil
	}
	m, ok := modelOf(key)
	if !ok {
		return nil, fmt.Errorf("no model %q: there are %s", key, modelKeys())
	}
	if n.made >= mostBoards {
		return nil, fmt.Errorf("the node has had %d boards, which is the most it can", mostBoards)
	}
	return n.newBoard(m, 0), nil
}
