package simnode

import "github.com/virgate/virgate/internal/nvml"

// DeviceGetUtilizationRates is the sum of what the processes do.
func (n *Node) DeviceGetUtilizationRates(d nvml.Device) (nvml.Utilization, error) {
	return askWhole(n, "DeviceGetUtilizationRates", d, func(b *board) (nvml.Utilization, nvml.Return) {
		return nvml.Utilization{GPU: b.work.busy()}, nvml.Success
	})
}

// DeviceGetProcessUtilization takes a sample if one is due.
func (n *Node) DeviceGetProcessUtilization(d nvml.Device, lastSeen uint64) ([]nvml.ProcessSample, error) {
	return askWhole(n, "DeviceGetProcessUtilization", d, func(b *board) ([]nvml.ProcessSample, nvml.Return) {
		samples := b.work.since(lastSeen)
		if len(samples) == 0 {
			return nil, nvml.NotFound
		}
		return samples, nvml.Success
	})
}

// DeviceGetCurrentClocksEventReasons is what Throttle says.
func (n *Node) DeviceGetCurrentClocksEventReasons(d nvml.Device) (nvml.ClockReasons, error) {
	return askBoard(n, "DeviceGetCurrentClocksEventReasons", d, func(b *board) (nvml.ClockReasons, nvml.Return) {
		return b.slowed, nvml.Success
	})
}

// askWhole is ask for a call that makes no sense for a MIG device, nor for a
// board that has MIG enabled.
func askWhole[T any](n *Node, call string, d nvml.Device, answer func(*board) (T, nvml.Return)) (T, error) {
	return askBoard(n, call, d, func(b *board) (T, nvml.Return) {
		if b.mig {
			var nothing T
			return nothing, nvml.NotSupported
		}
		return answer(b)
	})
}
