package mig

import "fmt"

// Placement is where a GPU instance lies on its board, in memory slots.
type Placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// Overlaps says that the two placements share a slot.
func (p Placement) Overlaps(q Placement) bool {
	return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

// String is "start:size", as nvidia-smi mig -lgi prints it.
func (p Placement) String() string { return fmt.Sprintf("%d:%d", p.Start, p.Size) }
