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
	// links is the number of active NVLinks by the bus ID of the other end.
	links map[string]int
	// shapes are the names of the board's GPU instance profiles by published
	// ID; nil until MIG is first seen enabled.
	shapes map[int]mig.Profile
	// last is the last whole reading, which a probe refreshes.
	last reading
}

// reading is what one look saw of one board.
type reading struct {
	// gpu is the board, without faults.
	gpu    sharing.GPU
	device Device
	// partitions are the handles of gpu.Partitions, by UUID.
	partitions map[string]Device
	vitals
	// reset is evidence that the board was reset since the look before: the
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
	return &board{device: device, fixed: gpu, links: readLinks(lib, device)}, nil
}

// read takes a whole reading. An error says that the handle is of no use: the
// board is lost, the handle names another one, or it does not tell whether it
// has MIG enabled, without which it must not be offered as anything.
func (b *board) read(lib Library) (reading, error) {
	r := reading{gpu: b.fixed, device: b.device}
	uuid, err := lib.DeviceGetUUID(b.device)
	if err != nil {
		return r, err
	}
	if uuid != b.fixed.UUID {
		return r, fmt.Errorf("the handle of %s now names %s", b.fixed.UUID, uuid)
	}
	r.gpu.MIG, r.gpu.MIGPending, err = lib.DeviceGetMigMode(b.device)
	if err != nil && !unsupported(err) {
		return r, err
	}
	if r.gpu.MIG {
		if err = b.readPartitions(lib, &r); err != nil {
			return r, err
		}
	}
	if err = r.examine(lib); err != nil {
		return r, err
	}
	b.last = r
	return r, nil
}

// probe looks only at how the board fares, and is else the last reading. An
// error is for read to look into: a handle is of no use, or a partition does not
// answer, which is as likely gone as ill.
func (b *board) probe(lib Library) (reading, error) {
	r := b.last
	if err := r.examine(lib); err != nil {
		return r, err
	}
	for _, p := range r.gpu.Partitions {
		if len(r.findings[p.UUID]) > 0 && len(b.last.findings[p.UUID]) == 0 {
			return r, fmt.Errorf("MIG device %d does not answer", p.Index)
		}
	}
	return r, nil
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
