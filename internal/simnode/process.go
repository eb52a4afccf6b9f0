package simnode

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/virgate/virgate/internal/nvml"
)

// WholeGPU as a MIG device index means the board itself.
const WholeGPU = -1

// AddProcess lets a process use the board, or the MIG device at the index, and
// so many bytes of its memory. A partition with a process cannot be destroyed.
func (n *Node) AddProcess(gpu, device, pid int, bytes uint64) error {
	return n.changeProcesses(gpu, device, func(list []nvml.Process) ([]nvml.Process, error) {
		if slices.ContainsFunc(list, func(p nvml.Process) bool { return p.PID == pid }) {
			return nil, fmt.Errorf("process %d is there already", pid)
		}
		return append(list, nvml.Process{PID: pid, Memory: bytes}), nil
	})
}

// RemoveProcess ends the process's use.
func (n *Node) RemoveProcess(gpu, device, pid int) error {
	err := n.changeProcesses(gpu, device, func(list []nvml.Process) ([]nvml.Process, error) {
		at := slices.IndexFunc(list, func(p nvml.Process) bool { return p.PID == pid })
		if at < 0 {
			return nil, fmt.Errorf("process %d is not there", pid)
		}
		return slices.Delete(list, at, at+1), nil
	})
	if err == nil {
		n.forget(gpu, pid)
	}
	return err
}

func (n *Node) changeProcesses(gpu, device int, change func([]nvml.Process) ([]nvml.Process, error)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	b, err := n.board(gpu)
	if err != nil {
		return err
	}
	list, where := &b.processes, fmt.Sprintf("GPU %d", gpu)
	if device != WholeGPU {
		where = fmt.Sprintf("MIG device %d:%d", gpu, device)
		c := b.computeAt(device)
		if c == nil {
			return fmt.Errorf("no %s", where)
		}
		list = &c.processes
	} else if b.mig {
		return fmt.Errorf("%s has MIG enabled: a process needs one of its MIG devices", where)
	}
	changed, err := change(*list)
	if err != nil {
		return fmt.Errorf("%s: %w", where, err)
	}
	*list = changed
	return nil
}

func (b *board) allProcesses() []nvml.Process {
	all := slices.Clone(b.processes)
	for _, i := range b.instances {
		for _, c := range i.computes {
			all = append(all, c.processes...)
		}
	}
	return all
}

func sortedProcesses(list []nvml.Process) []nvml.Process {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b nvml.Process) int { return cmp.Compare(a.PID, b.PID) })
	return list
}
