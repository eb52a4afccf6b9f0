package simnode

import (
	"fmt"
	"maps"
	"slices"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// XID makes the GPU report an XID error, as an event. Only XID 154 has another effect: from then on
// the driver advises a reset, until the GPU is reset. gi and ci are the IDs of a GPU instance and a
// compute instance, or nvml.WholeGPU.
func (n *Node) XID(gpu int, code uint64, gi, ci uint32) error {
	return n.change(gpu, func(g *simGPU) {
		if code == sharing.RecoveryActionChanged {
			n.advise(g, nvml.RecoverReset)
		}
		n.emit(g, nvml.Event{
			Type: nvml.EventXIDCritical,
			Data: code,
			GI:   gi,
			CI:   ci,
		})
	})
}

// Advise makes the driver advise a recovery action for the GPU (nvml.RecoverReset, …), and report
// the advice as an event, without an XID.
func (n *Node) Advise(gpu int, action uint32) error {
	return n.change(gpu, func(g *simGPU) { n.advise(g, action) })
}

func (n *Node) advise(g *simGPU, action uint32) {
	if g.recovery != action {
		g.recovery = action
		n.emit(g, nvml.Event{
			Type: nvml.EventRecoveryAction,
			GI:   nvml.WholeGPU,
			CI:   nvml.WholeGPU,
		})
	}
}

// SetFabric sets the GPU's place in the NVLink fabric. It causes no event.
func (n *Node) SetFabric(gpu int, fabric nvml.FabricInfo) error {
	return n.change(gpu, func(g *simGPU) { g.fabric = fabric })
}

// SetReady sets the ready state of confidential computing.
func (n *Node) SetReady(state uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ready = state
}

// Unavailable makes the GPU report that it is unavailable, as an event.
func (n *Node) Unavailable(gpu int) error {
	return n.change(gpu, func(g *simGPU) {
		n.emit(g, nvml.Event{
			Type: nvml.EventGPUUnavailable,
			GI:   nvml.WholeGPU,
			CI:   nvml.WholeGPU,
		})
	})
}

// ECC makes the GPU report an error of its DRAM, either a double-bit error or a corrected
// single-bit error.
func (n *Node) ECC(gpu int, double bool) error {
	kind := nvml.EventSingleBitECC
	if double {
		kind = nvml.EventDoubleBitECC
	}
	return n.change(gpu, func(g *simGPU) {
		for _, aggregate := range []bool{false, true} {
			g.errors[nvml.MemoryErrorCounter{
				Uncorrected: double,
				Aggregate:   aggregate,
				Location:    nvml.DRAM,
			}]++
		}
		n.emit(g, nvml.Event{
			Type: kind,
			GI:   nvml.WholeGPU,
			CI:   nvml.WholeGPU,
		})
	})
}

// Repair makes the GPU report that a memory repair waits for a reset: row remapping from Ampere on,
// page retirement before.
func (n *Node) Repair(gpu int) error {
	return n.change(gpu, func(g *simGPU) {
		if g.Architecture >= nvml.Ampere {
			g.rows.Pending = true
			return
		}
		g.pagesPending = true
	})
}

// Lose makes the GPU fall off the bus. It still counts as a GPU of the node, but every call for it
// or for its partitions returns GPU_IS_LOST.
func (n *Node) Lose(gpu int) error {
	return n.change(gpu, func(g *simGPU) {
		g.lost, g.healed = true, false
		n.wakeWaits()
	})
}

// Heal resets the GPU. It then answers again, but only with new handles. If it was lost, it answers
// only after all programs have closed the driver and it was opened again. Its temperature is
// normal, its memory is repaired, its processes are gone, a pending MIG mode is in force unless
// that requires a Reboot, and the faults of InjectGPUFault have ended. As with real GPUs, there is
// no event for a reset.
//
// All instances are gone, and their handles are void.
func (n *Node) Heal(gpu int) error { return n.change(gpu, n.reset) }

// ResetGPU acts like nvidia-smi --gpu-reset on the GPU with that PCI bus ID, and does what Heal
// does. It is refused while a program has the GPU open, for example one that has not closed the
// driver; while the GPU is in persistence mode; in a virtual machine that
// cannot reset it; and for a lost GPU, which requires a Reboot.
func (n *Node) ResetGPU(busID string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	g := find(n.gpus, func(g *simGPU) bool { return g.busID() == busID })
	if g == nil {
		return fmt.Errorf("no devices were found with the PCI bus ID %q", busID)
	}
	return n.resetUnused(g)
}

func (n *Node) resetUnused(g *simGPU) error {
	switch {
	case g.lost:
		return fmt.Errorf(
			"unable to determine the device handle for GPU %s: GPU is lost. Reboot the system to recover this GPU",
			g.busID())
	case n.is("passthrough"):
		return fmt.Errorf("resetting GPU %s is not supported", g.busID())
	case n.hasOpen(g) || g.persistence || len(g.allProcesses()) > 0 || n.hasClient():
		return fmt.Errorf("%w: the following GPUs could not be reset: GPU %s: In use by another client", mig.ErrInUse,
			g.busID())
	}
	n.reset(g)
	return nil
}

func (n *Node) reset(g *simGPU) {
	if g.fabric.State != nvml.FabricNotSupported { // As after a rebind (dra-driver-nvidia-gpu#1276).
		g.fabric = nvml.FabricInfo{State: nvml.FabricInProgress}
	}
	g.healed = g.lost && n.opened > 0
	g.lost, g.recovery = g.healed, nvml.RecoverNone
	g.temperature = normalTemperature
	g.meter.read()
	g.meter.milliwatts = normalPower
	if g.rows.Pending {
		g.rows.Pending = false
		g.rows.Uncorrectable++
	}
	g.pagesPending = false
	if !n.is("passthrough") {
		g.mig = g.migPending
	}
	g.processes = nil
	g.utilization = utilization{}
	g.clockReasons = 0
	g.computeMode, g.timeSlice = nvml.ComputeDefault, ""
	maps.DeleteFunc(n.targets, func(_ uint64, t target) bool { return t.gpu == g && t.instance != nil })
	g.instances = nil
	n.faults = slices.DeleteFunc(n.faults, func(f *injectedFault) bool { return f.gpu == g })
	n.renewHandles(g)
}

// Persistence acts like nvidia-smi --query-gpu=persistence_mode on the GPU with that PCI bus ID.
func (n *Node) Persistence(busID string) (on bool, err error) {
	err = n.changeMode(busID, func(g *simGPU) { on = g.persistence })
	return on, err
}

// SetPersistence acts like nvidia-smi -pm on the GPU with that PCI bus ID.
func (n *Node) SetPersistence(busID string, on bool) error {
	if !n.MayChangeMIG() {
		return fmt.Errorf("unable to set persistence mode for GPU %s: Insufficient Permissions", busID)
	}
	return n.changeMode(busID, func(g *simGPU) { g.persistence = on })
}

func (n *Node) changeMode(busID string, change func(*simGPU)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	g := find(n.gpus, func(g *simGPU) bool { return g.busID() == busID })
	if g == nil || g.lost {
		return fmt.Errorf("no devices were found with the PCI bus ID %q", busID)
	}
	change(g)
	return nil
}

// SetTimeSlice acts like nvidia-smi compute-policy --set-timeslice on the GPU with that UUID. It
// refuses what nvidia-smi refuses, with invented texts.
func (n *Node) SetTimeSlice(gpu string, slice sharing.TimeSlice) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	g := find(n.gpus, func(g *simGPU) bool { return g.uuid == gpu })
	switch {
	case g == nil || g.lost:
		return fmt.Errorf("no devices were found with the ID %s", gpu)
	case !n.MayChangeMIG():
		return fmt.Errorf("unable to set the time slice of GPU %s: Insufficient Permissions", g.busID())
	case g.mig:
		return fmt.Errorf("unable to set the time slice of GPU %s: Not Supported", g.busID())
	}
	g.timeSlice = slice
	return nil
}

// Reload unloads the driver and loads it again, which resets all GPUs. It fails while a program has
// the driver open.
func (n *Node) Reload() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.opened > 0 {
		return fmt.Errorf("the driver is in use: it was opened %d times more than closed", n.opened)
	}
	for _, g := range n.gpus {
		n.bind(g)
		n.reset(g)
		g.load()
	}
	return nil
}

// SetTemperature sets the temperature of the GPU's core, in degrees Celsius.
func (n *Node) SetTemperature(gpu, celsius int) error {
	return n.change(gpu, func(g *simGPU) { g.temperature = celsius })
}

// SetPower sets the power that the GPU draws, in watts.
func (n *Node) SetPower(gpu, watts int) error {
	return n.change(gpu, func(g *simGPU) {
		g.meter.read()
		g.meter.milliwatts = watts * 1000
	})
}

// Throttle sets the reasons why the GPU's clocks are reduced; 0 for none.
func (n *Node) Throttle(gpu int, reasons nvml.ClockReasons) error {
	return n.change(gpu, func(g *simGPU) { g.clockReasons = reasons })
}

// Remove takes the GPU out of the node. The indexes of the GPUs after it go down by one, and calls
// with its handles return GPU_IS_LOST.
func (n *Node) Remove(gpu int) error {
	return n.Change(func(now Change) error { return now.Remove(gpu) })
}

// Add puts a new GPU of the model into the node and returns its index. If model is empty, it puts
// the GPU back that was removed last, reset and at its old PCI address.
func (n *Node) Add(model string) (gpu int, err error) {
	err = n.Change(func(now Change) error {
		gpu, err = now.Add(model)
		return err
	})
	return gpu, err
}

// Change gives access to the node while its GPUs change. Only the function passed to Node.Change
// may use it.
type Change struct{ node *Node }

// Change applies several changes at once: no call of the driver sees only some of them.
func (n *Node) Change(change func(Change) error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return change(Change{n})
}

// Remove is Node.Remove.
func (c Change) Remove(gpu int) error {
	n := c.node
	g, err := n.gpu(gpu)
	if err != nil {
		return err
	}
	g.removed = true
	n.gpus = append(n.gpus[:gpu:gpu], n.gpus[gpu+1:]...)
	n.removed = append(n.removed, g)
	n.wakeWaits()
	return nil
}

// Add is Node.Add.
func (c Change) Add(model string) (gpu int, err error) {
	g, err := c.node.gpuToAdd(model)
	if err != nil {
		return 0, err
	}
	c.node.insert(g)
	return slices.Index(c.node.gpus, g), nil
}

func (n *Node) gpuToAdd(key string) (*simGPU, error) {
	if key == "" {
		last := len(n.removed) - 1
		if last < 0 {
			return nil, fmt.Errorf("no GPU was removed that could be added again; to add a new one, name a model: %s",
				modelKeys())
		}
		g := n.removed[last]
		n.removed = n.removed[:last]
		g.lost, g.removed = false, false
		n.bind(g)
		n.reset(g)
		g.load()
		return g, nil
	}
	m, ok := modelOf(key)
	if !ok {
		return nil, fmt.Errorf("no model %q: there are %s", key, modelKeys())
	}
	if n.gpusMade >= maxGPUs {
		return nil, fmt.Errorf("the node has had %d GPUs, which is the most it can", maxGPUs)
	}
	return n.newGPU(m, 0), nil
}

func (n *Node) change(gpu int, change func(*simGPU)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	g, err := n.gpu(gpu)
	if err != nil {
		return err
	}
	change(g)
	return nil
}
