package simnode

import (
	"fmt"
	"slices"

	"github.com/virgate/virgate/internal/nvml"
)

// mpsRole is the role of a process of NVIDIA's MPS. As in the driver (nvml.h, and the types C and
// M+C of nvidia-smi), a server is in the list of compute processes and its clients are in the list
// for MPS. In the compute mode EXCLUSIVE_PROCESS the server counts as the one process; its clients
// do not count.
type mpsRole int

const (
	mpsServer mpsRole = iota + 1
	mpsClient
)

const (
	mpsServerBytes = 30 << 20
	mpsClientBytes = 256 << 20
	// firstServerPID is the process ID of the first server.
	firstServerPID = 900_001
)

// MPS starts and stops the servers and clients of NVIDIA's MPS on a node. Its methods take the UUID
// of the GPU or partition; see simmps.Servers.
type MPS struct{ node *Node }

// MPS returns the node's MPS.
func (n *Node) MPS() MPS { return MPS{n} }

// Start starts a server. Like any other process it cannot start if the GPU is busy.
func (m MPS) Start(device string) (pid int, err error) {
	gpu, index, err := m.node.find(device)
	if err != nil {
		return 0, err
	}
	m.node.mu.Lock()
	m.node.serversMade++
	pid = firstServerPID - 1 + m.node.serversMade
	m.node.mu.Unlock()
	if err := m.node.AddProcess(gpu, index, pid, mpsServerBytes); err != nil {
		return 0, fmt.Errorf("MPS server: %w", err)
	}
	m.node.setMPS(pid, mpsServer)
	return pid, nil
}

// Stop ends a server, and the processes of its clients on the GPU.
func (m MPS) Stop(device string, pid int) {
	gpu, index, err := m.node.find(device)
	if err != nil {
		return // Its processes are gone, too.
	}
	_ = m.node.changeProcesses(gpu, index, func(list []nvml.Process) ([]nvml.Process, error) {
		return slices.DeleteFunc(list,
			func(p nvml.Process) bool { return p.PID == pid || m.node.mps[p.PID] == mpsClient }), nil
	})
}

// AddClient makes the process a client that uses the device through its server.
func (m MPS) AddClient(device string, pid int) error {
	gpu, index, err := m.node.find(device)
	if err != nil {
		return err
	}
	err = m.node.changeProcesses(gpu, index, func(list []nvml.Process) ([]nvml.Process, error) {
		switch {
		case !slices.ContainsFunc(list, func(p nvml.Process) bool { return m.node.mps[p.PID] == mpsServer }):
			return nil, fmt.Errorf("no MPS server for process %d", pid)
		case indexOf(list, pid) >= 0:
			return nil, fmt.Errorf("process %d is there already", pid)
		}
		return append(list, nvml.Process{PID: pid, Memory: mpsClientBytes}), nil
	})
	if err == nil {
		m.node.setMPS(pid, mpsClient)
	}
	return err
}

// RemoveClient ends the client's use of the device.
func (m MPS) RemoveClient(device string, pid int) {
	if gpu, index, err := m.node.find(device); err == nil {
		_ = m.node.RemoveProcess(gpu, index, pid)
	}
}

// setMPS sets the process's role. changeProcesses removes it.
func (n *Node) setMPS(pid int, role mpsRole) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mps[pid] = role
}

// find returns the current indexes of the GPU or partition with that UUID.
func (n *Node) find(uuid string) (gpu, device int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, g := range n.gpus {
		if g.uuid == uuid {
			return i, WholeGPU, nil
		}
		if c, found := first(g.computes(), func(c *computeInstance) bool { return c.uuid == uuid }); found {
			return i, c.index, nil
		}
	}
	return 0, 0, fmt.Errorf("no GPU or partition %s", uuid)
}
