package nvml

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
)

// errorInterval is the time between two readings of the memory error counters. While a GPU corrects
// many errors, a driver under load took over 45 s for its monitoring calls (DCGM#313,
// NVSentinel#1748).
const errorInterval = time.Minute

// errorMeter reads the memory error counters of the GPU at an index. While its call is in flight,
// the call's goroutine owns the fields from device on.
type errorMeter struct {
	index int
	*pendingCall[memoryErrors]
	// began is when the last reading began. fresh is true until a caller has waited for that
	// reading. last is the last result that was received.
	began time.Time
	fresh bool
	last  memoryErrors

	// device and mig are the GPU and the mode for which counters were determined: the counters that
	// the driver may have.
	device   Device
	mig      bool
	counters []MemoryErrorCounter
}

// memoryErrors are a GPU's memory errors. With MIG enabled, a GPU has other counters.
type memoryErrors struct {
	gpu    string
	mig    bool
	counts []sharing.MemoryErrors
}

func newErrorMeter(index int) *errorMeter {
	return &errorMeter{index: index, pendingCall: newPendingCall[memoryErrors]()}
}

// beginIfDue starts a reading if the last one is old enough and has been answered.
func (e *errorMeter) beginIfDue(lib Library) {
	if e.inFlight || time.Since(e.began) < errorInterval {
		return
	}
	e.fresh, e.began = true, time.Now()
	e.begin(func() (memoryErrors, error) {
		return whileOpen(lib, func() (memoryErrors, error) { return e.read(lib) })
	})
}

// of returns the last reading for the GPU in that mode. It returns nil if there is none, and makes
// the next reading due. It waits for each reading only once.
func (e *errorMeter) of(enough context.Context, gpu string, mig bool) []sharing.MemoryErrors {
	if !e.fresh {
		over, cancel := context.WithCancel(enough)
		cancel()
		enough = over
	}
	e.fresh = false
	if errors, err := e.wait(enough); err == nil {
		e.last = errors
	}
	if e.last.gpu != "" && (e.last.gpu != gpu || e.last.mig != mig) {
		e.last, e.began = memoryErrors{}, time.Time{}
	}
	return e.last.counts
}

// read reads the counters, and stops asking for counters that the driver does not have. For a
// counter that it does not know at all, the driver returns INVALID_ARGUMENT.
func (e *errorMeter) read(lib Library) (m memoryErrors, err error) {
	device, err := lib.DeviceGetHandleByIndex(e.index)
	if err != nil {
		return m, err
	}
	m.gpu, err = lib.DeviceGetUUID(device)
	if err != nil {
		return m, err
	}
	mode, err := lib.DeviceGetMigMode(device)
	if err != nil && !unsupported(err) {
		return m, err
	}
	m.mig = mode.Current
	if device != e.device || m.mig != e.mig {
		e.device = device
		e.mig = m.mig
		e.counters = errorCounters(lib, device)
	}
	var abandoned error
	e.counters = slices.DeleteFunc(e.counters, func(counter MemoryErrorCounter) bool {
		count, err := lib.DeviceGetMemoryErrorCounter(device, counter)
		if err == nil {
			kind := "corrected"
			if counter.Uncorrected {
				kind = "uncorrected"
			}
			m.counts = append(m.counts, sharing.MemoryErrors{
				Kind:     kind,
				Location: memoryLocations[counter.Location],
				Lifetime: counter.Aggregate,
				Count:    float64(count),
			})
		}
		if late, ok := errors.AsType[*AbandonedError](err); ok {
			abandoned = late
		}
		return unsupported(err) || errors.Is(err, InvalidArgument)
	})
	return m, abandoned
}

// errorCounters returns the memory error counters that the GPU may have. From Turing on there are
// only two locations (nvml.h), so the others are not read.
func errorCounters(lib Library, device Device) (all []MemoryErrorCounter) {
	architecture, err := lib.DeviceGetArchitecture(device)
	for location := range memoryLocations {
		if err == nil && architecture >= Turing && location != DRAM && location != SRAM {
			continue
		}
		for _, uncorrected := range []bool{false, true} {
			for _, aggregate := range []bool{false, true} {
				all = append(all, MemoryErrorCounter{uncorrected, aggregate, location})
			}
		}
	}
	return all
}
