package nvml

import (
	"errors"
	"fmt"
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// board is a board's handle, with what holds for as long as the handle does.
type board struct {
	device Device
	// fixed has the facts that do not change; no health, memory or MIG.
	fixed sharing.GPU
	// shapes are the names of the board's GPU instance profiles by published
	// ID; nil until MIG is first seen enabled.
	shapes map[int]mig.Profile
}

// reading is what one pass saw of one board.
type reading struct {
	// gpu is the board with the faults that this reading alone shows.
	gpu    sharing.GPU
	device Device
	// celsius is meaningless unless thermometer is set.
	celsius     int
	thermometer bool
	// reset is evidence that the board was reset since the pass before: the
	// handle it had is dead and a new one works.
	reset bool
	// problems are the partitions that could not be read and are missing from
	// gpu; nil when none are.
	problems error
}

// identify reads the facts that do not change. The UUID, the product name and
// the place on the bus are what the rest of the program tells boards apart by,
// so a board without them is of no use; the others may be unknown.
func identify(lib Library, device Device, index int) (*board, error) {
	gpu := sharing.GPU{Index: index, Minor: -1, NUMANode: -1}
	var err error
	if gpu.UUID, err = lib.DeviceGetUUID(device); err != nil {
		return nil, err
	}
	if gpu.Model, err = lib.DeviceGetName(device); err != nil {
		return nil, err
	}
	pci, err := lib.DeviceGetPciInfo(device)
	if err != nil {
		return nil, err
	}
	gpu.PCIBusID = pci.BusID
	if minor, err := lib.DeviceGetMinorNumber(device); err == nil {
		gpu.Minor = minor
	}
	if node, err := lib.DeviceGetNumaNodeId(device); err == nil {
		gpu.NUMANode = node
	}
	if architecture, err := lib.DeviceGetArchitecture(device); err == nil {
		gpu.Architecture = architecture.String()
	}
	if major, minor, err := lib.DeviceGetCudaComputeCapability(device); err == nil {
		gpu.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
	}
	return &board{device: device, fixed: gpu}, nil
}

// read takes a reading. An error says that the handle is of no use: the board
// is lost, the handle names another one, or it does not tell whether it has MIG
// enabled, without which it must not be offered as anything.
func (b *board) read(lib Library) (reading, error) {
	r := reading{gpu: b.fixed, device: b.device}
	uuid, err := lib.DeviceGetUUID(b.device)
	if err != nil {
		return r, err
	}
	if uuid != b.fixed.UUID {
		return r, fmt.Errorf("the handle of %s now names %s", b.fixed.UUID, uuid)
	}
	if r.gpu.Memory, r.gpu.Fault, err = readMemory(lib, b.device); err != nil {
		return r, err
	}
	r.celsius, err = lib.DeviceGetTemperature(b.device)
	if errors.Is(err, GPUIsLost) {
		return r, err
	}
	r.thermometer = err == nil
	r.gpu.MIG, _, err = lib.DeviceGetMigMode(b.device)
	switch {
	case unsupported(err):
		return r, nil
	case err != nil:
		return r, err
	case r.gpu.MIG:
		r.gpu.Partitions, r.problems, err = b.partitions(lib)
	}
	return r, err
}

// readMemory is the device's memory in bytes, and a fault when the query fails:
// that it succeeds is the simplest sign of life that a device gives. A lost
// board is an error.
func readMemory(lib Library, device Device) (bytes uint64, fault string, err error) {
	memory, err := lib.DeviceGetMemoryInfo(device)
	switch {
	case err == nil:
		return memory.Total, "", nil
	case errors.Is(err, GPUIsLost):
		return 0, "", err
	case unsupported(err):
		// Boards that share the host's memory have none of their own to report.
		return 0, "", nil
	}
	return 0, "memory query: " + cause(err), nil
}

// unsupported says that the board or the driver does not know the call.
func unsupported(err error) bool {
	return errors.Is(err, NotSupported) || errors.Is(err, FunctionNotFound)
}

// cause is what a fault says of an error: the return code alone, which is the
// same whichever handle and call it came from, so that a fault keeps its words.
func cause(err error) string {
	if code, ok := errors.AsType[Return](err); ok {
		return code.String()
	}
	return strings.TrimSpace(err.Error())
}
