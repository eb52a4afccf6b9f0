package simnode

import "github.com/virgate/virgate/internal/nvml"

// Init opens the driver; like NVML it counts.
func (n *Node) Init() error {
	if err := n.enter("Init", nil); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.opened++
	return nil
}

// Shutdown takes back one Init. The last one frees the event sets.
func (n *Node) Shutdown() error {
	if err := n.enter("Shutdown", nil); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.opened--
	if n.opened == 0 {
		clear(n.sets)
		n.wake()
	}
	return nil
}

// SystemGetDriverVersion names a driver that knows all boards of this package.
func (n *Node) SystemGetDriverVersion() (string, error) {
	return "580.65.06", n.enter("SystemGetDriverVersion", nil)
}

// DeviceGetCount is the number of boards in the node, lost ones included.
func (n *Node) DeviceGetCount() (int, error) {
	if err := n.enter("DeviceGetCount", nil); err != nil {
		return 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.boards), nil
}

// DeviceGetHandleByIndex is GPU_IS_LOST for a lost board.
func (n *Node) DeviceGetHandleByIndex(index int) (nvml.Device, error) {
	const call = "DeviceGetHandleByIndex"
	n.mu.Lock()
	b, _ := n.board(index)
	n.mu.Unlock()
	if err := n.enter(call, b); err != nil {
		return 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case b == nil:
		return 0, failed(with(call, index), nvml.InvalidArgument)
	case b.lost || b.pulled:
		return 0, failed(with(call, index), nvml.GPUIsLost)
	}
	return b.handle, nil
}

// DeviceGetUUID is the UUID of the board or of the MIG device.
func (n *Node) DeviceGetUUID(d nvml.Device) (string, error) {
	return ask(n, "DeviceGetUUID", d, func(t target) (string, nvml.Return) {
		if t.compute != nil {
			return t.compute.uuid, nvml.Success
		}
		return t.board.uuid, nvml.Success
	})
}

// DeviceGetMinorNumber is the board's ordinal.
func (n *Node) DeviceGetMinorNumber(d nvml.Device) (int, error) {
	return askBoard(n, "DeviceGetMinorNumber", d, func(b *board) (int, nvml.Return) {
		return b.ordinal, nvml.Success
	})
}

// DeviceGetPciInfo tells no subsystem ID.
func (n *Node) DeviceGetPciInfo(d nvml.Device) (nvml.PCIInfo, error) {
	return askBoard(n, "DeviceGetPciInfo", d, func(b *board) (nvml.PCIInfo, nvml.Return) {
		return nvml.PCIInfo{BusID: b.busID(), DeviceID: uint32(b.deviceID)<<16 | nvidia}, nvml.Success
	})
}

// DeviceGetName is the product name, with the profile of a MIG device.
func (n *Node) DeviceGetName(d nvml.Device) (string, error) {
	return ask(n, "DeviceGetName", d, func(t target) (string, nvml.Return) {
		if t.compute != nil {
			return t.board.name + " MIG " + t.compute.profile().String(), nvml.Success
		}
		return t.board.name, nvml.Success
	})
}

// DeviceGetMemoryInfo counts what the processes use.
func (n *Node) DeviceGetMemoryInfo(d nvml.Device) (nvml.MemoryInfo, error) {
	return ask(n, "DeviceGetMemoryInfo", d, func(t target) (nvml.MemoryInfo, nvml.Return) {
		total, used := t.board.memory(), t.board.used()
		if c := t.compute; c != nil {
			total, used = t.board.share(c.instance.placement.Size), usedBy(c.processes)
		}
		used = min(used, total)
		return nvml.MemoryInfo{Total: total, Free: total - used, Used: used}, nvml.Success
	})
}

// DeviceGetArchitecture is the model's.
func (n *Node) DeviceGetArchitecture(d nvml.Device) (nvml.Architecture, error) {
	return ask(n, "DeviceGetArchitecture", d, func(t target) (nvml.Architecture, nvml.Return) {
		return t.board.architecture, nvml.Success
	})
}

// DeviceGetCudaComputeCapability is the model's.
func (n *Node) DeviceGetCudaComputeCapability(d nvml.Device) (major, minor int, err error) {
	b, err := ask(n, "DeviceGetCudaComputeCapability", d, func(t target) (*board, nvml.Return) {
		return t.board, nvml.Success
	})
	if err != nil {
		return 0, 0, err
	}
	return b.major, b.minor, nil
}

// DeviceGetNumaNodeId is -1 for a board next to none.
func (n *Node) DeviceGetNumaNodeId(d nvml.Device) (int, error) {
	return askBoard(n, "DeviceGetNumaNodeId", d, func(b *board) (int, nvml.Return) {
		return b.numaNode, nvml.Success
	})
}

// DeviceGetTemperature is 34 °C unless Temperature says otherwise.
func (n *Node) DeviceGetTemperature(d nvml.Device) (int, error) {
	return askBoard(n, "DeviceGetTemperature", d, func(b *board) (int, nvml.Return) {
		return b.celsius, nvml.Success
	})
}

// DeviceGetComputeRunningProcesses is, for a board with MIG enabled, the
// processes of all its MIG devices.
func (n *Node) DeviceGetComputeRunningProcesses(d nvml.Device) ([]nvml.Process, error) {
	return ask(n, "DeviceGetComputeRunningProcesses", d, func(t target) ([]nvml.Process, nvml.Return) {
		if t.compute != nil {
			return sortedProcesses(t.compute.processes), nvml.Success
		}
		return sortedProcesses(t.board.allProcesses()), nvml.Success
	})
}
