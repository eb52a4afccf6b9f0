package nvml

import (
	"errors"

	"github.com/virgate/virgate/sharing"
)

// vitals is how a board fares.
type vitals struct {
	// findings are what is wrong, by the UUID of the board or of the partition;
	// the temperature, which takes memory of its own, is not among them.
	findings map[string][]finding
	// celsius is meaningless unless thermometer is set.
	celsius     int
	thermometer bool
}

func (v *vitals) found(unit string, f finding) {
	v.findings[unit] = with(v.findings[unit], f)
}

// examine reads the vitals of the board and of its partitions. A lost board is
// an error.
func (r *reading) examine(lib Library) error {
	r.vitals = vitals{findings: map[string][]finding{}}
	unit := r.gpu.UUID
	memory, err := r.readMemory(lib, r.device, unit)
	if err != nil {
		return err
	}
	r.gpu.Memory = memory
	r.celsius, err = lib.DeviceGetTemperature(r.device)
	if errors.Is(err, GPUIsLost) {
		return err
	}
	r.thermometer = err == nil
	if err := r.readRepairs(lib); err != nil {
		return err
	}
	partitions := make([]sharing.Partition, len(r.gpu.Partitions))
	for i, p := range r.gpu.Partitions {
		if p.Memory, err = r.readMemory(lib, r.partitions[p.UUID], p.UUID); err != nil {
			return err
		}
		partitions[i] = p
	}
	if len(partitions) > 0 {
		r.gpu.Partitions = partitions
	}
	return nil
}

// readMemory is the device's memory in bytes, 0 when unknown. That the query
// succeeds is the simplest sign of life that a device gives, so it is a finding
// when it does not. A lost board is an error.
func (r *reading) readMemory(lib Library, device Device, unit string) (bytes uint64, err error) {
	memory, err := lib.DeviceGetMemoryInfo(device)
	switch {
	case err == nil:
		return memory.Total, nil
	case errors.Is(err, GPUIsLost):
		return 0, err
	case unsupported(err):
		// Boards that share the host's memory have none of their own to report.
		return 0, nil
	}
	r.found(unit, finding{sharing.CauseMemory, "memory query: " + cause(err)})
	return 0, nil
}

// readRepairs asks for repairs of memory that wait for a reset. Until then the
// board works around the broken place, and its next error may be a worse one.
// A board that does not tell has none.
func (r *reading) readRepairs(lib Library) error {
	rows, err := lib.DeviceGetRemappedRows(r.device)
	switch {
	case errors.Is(err, GPUIsLost):
		return err
	case err != nil:
	case rows.Failed:
		r.found(r.gpu.UUID, finding{sharing.CauseMemory, "row remapping failed"})
	case rows.Pending:
		r.found(r.gpu.UUID, finding{sharing.CauseMemory, "row remapping waits for a reset"})
	}
	pending, err := lib.DeviceGetRetiredPagesPendingStatus(r.device)
	switch {
	case errors.Is(err, GPUIsLost):
		return err
	case err == nil && pending:
		r.found(r.gpu.UUID, finding{sharing.CauseMemory, "page retirement waits for a reset"})
	}
	return nil
}
