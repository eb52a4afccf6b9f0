//go:build cgo

package driver

import (
	"math"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/virgate/virgate/internal/nvml"
)

func (l *library) EventSetCreate() (nvml.EventSet, error) {
	return asked(l, "EventSetCreate", func(api gonvml.Interface) (nvml.EventSet, gonvml.Return) {
		return l.sets.numbered(api.EventSetCreate())
	})
}

func (l *library) DeviceGetSupportedEventTypes(d nvml.Device) (nvml.EventTypes, error) {
	types, err := askDevice(l, "DeviceGetSupportedEventTypes", d, gonvml.Device.GetSupportedEventTypes)
	return nvml.EventTypes(types), err
}

func (l *library) DeviceRegisterEvents(d nvml.Device, types nvml.EventTypes, set nvml.EventSet) error {
	_, err := askDevice(l, "DeviceRegisterEvents", d, func(d gonvml.Device) (struct{}, gonvml.Return) {
		handle, known := l.sets.handle(set)
		if !known {
			return struct{}{}, gonvml.ERROR_INVALID_ARGUMENT
		}
		return struct{}{}, d.RegisterEvents(uint64(types), handle)
	})
	return err
}

func (l *library) EventSetWait(set nvml.EventSet, timeout time.Duration) (nvml.Event, error) {
	const call = "EventSetWait"
	event, err := ask(l, call, &l.sets, set, func(set gonvml.EventSet) (gonvml.EventData, gonvml.Return) {
		return set.Wait(milliseconds(timeout))
	})
	if err != nil {
		return nvml.Event{}, err
	}
	partitions, err := asked(l, call, func(api gonvml.Interface) (bool, gonvml.Return) {
		return api.Extensions().LookupSymbol("nvmlEventSetWait_v2") == nil, gonvml.SUCCESS
	})
	if !partitions {
		// The wait of drivers before 450 does not fill these in.
		event.GpuInstanceId, event.ComputeInstanceId = nvml.WholeBoard, nvml.WholeBoard
	}
	return nvml.Event{
		Device: l.devices.number(event.Device), Type: nvml.EventTypes(event.EventType), Data: event.EventData,
		GI: event.GpuInstanceId, CI: event.ComputeInstanceId,
	}, err
}

// milliseconds is the time in the driver's unit, rounded up: to wait for 0 of
// them, again and again, would be to spin.
func milliseconds(timeout time.Duration) uint32 {
	const unit = time.Millisecond
	whole := (max(timeout, 0) + unit - 1) / unit
	return uint32(min(whole, math.MaxUint32))
}

// EventSetFree forgets the set: the driver may give its handle to a new one.
func (l *library) EventSetFree(set nvml.EventSet) error {
	_, err := ask(l, "EventSetFree", &l.sets, set, func(handle gonvml.EventSet) (struct{}, gonvml.Return) {
		code := handle.Free()
		if code == gonvml.SUCCESS {
			l.sets.forget(set)
		}
		return struct{}{}, code
	})
	return err
}
