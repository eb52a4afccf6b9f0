package simnode

import (
	"errors"
	"fmt"

	"github.com/virgate/virgate/mig"
)

// mostBoards bounds what a description can ask for.
const mostBoards = 64

// description is what a node consists of, as a file or a name says it.
type description struct {
	// Name is what the UUIDs follow from.
	Name   string  `json:"name"`
	Boards []group `json:"boards"`
}

// group is some equal boards.
type group struct {
	// Model is a key of models.
	Model string `json:"model"`
	// Count is the number of boards, 1 when absent.
	Count *int `json:"count"`
	// NUMANode is the NUMA node next to them, -1 for none. When absent, the
	// node's boards are halved between NUMA nodes 0 and 1 if there are at least
	// four, else they are all at 0.
	NUMANode *int `json:"numaNode"`
	// Layout is a mig.NamedLayout to cut the boards by; empty for MIG off.
	Layout string `json:"layout"`
}

func (g group) count() int {
	if g.Count == nil {
		return 1
	}
	return *g.Count
}

// validate reports everything that is wrong with the description.
func (d description) validate() error {
	var problems []error
	wrong := func(format string, values ...any) { problems = append(problems, fmt.Errorf(format, values...)) }
	total := 0
	for i, g := range d.Boards {
		if _, ok := modelOf(g.Model); !ok {
			wrong("boards[%d].model: %q is none of %s", i, g.Model, modelKeys())
		}
		if count := g.count(); count < 1 || count > mostBoards {
			wrong("boards[%d].count: %d is not in 1 to %d", i, count, mostBoards)
		} else {
			total += count
		}
		if g.NUMANode != nil && *g.NUMANode < -1 {
			wrong("boards[%d].numaNode: %d is below -1, which stands for none", i, *g.NUMANode)
		}
	}
	if total > mostBoards {
		wrong("boards: %d are more than %d", total, mostBoards)
	}
	return errors.Join(problems...)
}

// build makes the node.
func (d description) build() (*Node, error) {
	if err := d.validate(); err != nil {
		return nil, err
	}
	total := 0
	for _, g := range d.Boards {
		total += g.count()
	}
	n := newNode(d.Name)
	for i, g := range d.Boards {
		m, _ := modelOf(g.Model)
		for range g.count() {
			numaNode := 0
			switch {
			case g.NUMANode != nil:
				numaNode = *g.NUMANode
			case total >= 4:
				numaNode = n.made * 2 / total
			}
			b := n.newBoard(m, numaNode)
			n.plug(b)
			if g.Layout == "" {
				continue
			}
			if err := n.cut(b, g.Layout); err != nil {
				return nil, fmt.Errorf("boards[%d].layout: %w", i, err)
			}
		}
	}
	return n, nil
}

// cut makes the board's partitions as the layout says, on a board that has none.
func (n *Node) cut(b *board, name string) error {
	layout, err := mig.NamedLayout(name, b.geometry)
	if err != nil {
		return fmt.Errorf("%s: %w", b.name, err)
	}
	placed, err := b.geometry.Place(layout, nil)
	if err != nil {
		return fmt.Errorf("%s: MIG layout %q: %w", b.name, name, err)
	}
	b.mig, b.migPending = layout.MIG, layout.MIG
	for _, p := range placed {
		shape, _ := b.geometry.Shape(p.Profile)
		i := b.instanceAt(p.Placement)
		if i == nil {
			i = n.addInstance(b, shape, p.Placement)
		}
		n.addCompute(b, i, p.Profile.Compute)
	}
	return nil
}
