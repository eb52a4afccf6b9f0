package sharing

import (
	"cmp"
	"slices"
)

// UseReport says who uses the node's boards, and how much.
type UseReport struct {
	// Boards are as measured.
	Boards []BoardUse
	// Attributed says that processes could be told apart by container. If not,
	// the fields below are empty and nothing is known of them.
	Attributed bool
	// Containers are those that hold a unit which could be read, by unit,
	// namespace, pod and container.
	Containers []ContainerUse
	// Unattributed has an entry for each cause of each board that could be read,
	// by board and in the order of UnattributedCauses.
	Unattributed []UnattributedUse
	// Contention has the boards on which containers compute, by UUID.
	Contention []Contention
}

// ContainerUse is how a container uses a unit of which it holds a device.
type ContainerUse struct {
	Container
	// GPU and Unit are UUIDs.
	GPU, Unit string
	// Processes is how many it has on the unit.
	Processes int
	// Memory is in bytes; SM is the ratio of the board's multiprocessors, unknown
	// on a partition. Both are 0 for a container without processes.
	Memory, SM Figure
	// OverShare is the memory in bytes beyond the container's fair share, which is
	// the unit's memory by the devices that stand for it, times those held; 0 for
	// one within it, unknown for a unit that is offered no more.
	OverShare Figure
}

// UnattributedUse is what processes use that are no holder's.
type UnattributedUse struct {
	GPU        string
	Cause      UnattributedCause
	Processes  int
	Memory, SM Figure
}

// NewUseReport joins a measurement with who holds what. Each process counts
// once: for its container where that holds a device of the unit, else for a
// cause. The sums over a board are therefore the driver's.
//
// allocations are those at the time of the measurement; known is false when they
// could not be read, and then nothing is attributed.
func NewUseReport(m Measurement, gpus []GPU, resources []Resource, allocations []Allocation, known bool) UseReport {
	report := UseReport{Boards: m.Boards}
	if m.Owners == nil || !known {
		return report
	}
	report.Attributed = true
	shares := newShares(gpus, resources, allocations)
	for _, board := range m.Boards {
		rest := newRest(board)
		for _, unit := range board.Units {
			report.Containers = append(report.Containers, split(board.GPU, unit, m.Owners, shares, rest)...)
		}
		report.Unattributed = append(report.Unattributed, rest.list()...)
	}
	slices.SortFunc(report.Containers, func(a, b ContainerUse) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Unit, b.Unit), compareContainers(a.Container, b.Container))
	})
	report.Contention = contention(m.Boards, report.Containers)
	return report
}

// split gives the unit's processes to its holders, and the others to the rest.
func split(gpu string, unit UnitProcesses, owners map[int]Owner, shares shares, rest *rest) []ContainerUse {
	holders := shares.holders[unit.Unit]
	uses := make(map[Container]*ContainerUse, len(holders))
	nothing := KnownFigure(0)
	sm := nothing
	if unit.Unit != gpu {
		sm = Figure{}
	}
	for container := range holders {
		uses[container] = &ContainerUse{Container: container, GPU: gpu, Unit: unit.Unit, Memory: nothing, SM: sm}
	}
	for _, process := range unit.Processes {
		owner, looked := owners[process.PID]
		if !looked {
			owner.Cause = CauseUnreadable
		}
		use := uses[owner.Container]
		switch {
		case owner.Cause != "":
			rest.add(owner.Cause, process)
		case use == nil:
			rest.add(CauseNotAllocated, process)
		default:
			use.Processes++
			use.Memory, use.SM = use.Memory.plus(process.Memory), use.SM.plus(process.SM)
		}
	}
	list := make([]ContainerUse, 0, len(uses))
	for container, use := range uses {
		use.OverShare = shares.over(unit.Unit, holders[container], use.Memory)
		list = append(list, *use)
	}
	return list
}

// rest collects what is no holder's on one board.
type rest struct {
	byCause map[UnattributedCause]*UnattributedUse
}

func newRest(board BoardUse) *rest {
	r := &rest{byCause: map[UnattributedCause]*UnattributedUse{}}
	sm := KnownFigure(0)
	for _, unit := range board.Units {
		if unit.Unit != board.GPU {
			sm = Figure{}
		}
	}
	if len(board.Units) == 0 {
		return r
	}
	for _, cause := range UnattributedCauses() {
		r.byCause[cause] = &UnattributedUse{GPU: board.GPU, Cause: cause, Memory: KnownFigure(0), SM: sm}
	}
	return r
}

func (r *rest) add(cause UnattributedCause, process ProcessUse) {
	use := r.byCause[cause]
	use.Processes++
	use.Memory, use.SM = use.Memory.plus(process.Memory), use.SM.plus(process.SM)
}

func (r *rest) list() []UnattributedUse {
	var list []UnattributedUse
	for _, cause := range UnattributedCauses() {
		if use := r.byCause[cause]; use != nil {
			list = append(list, *use)
		}
	}
	return list
}
