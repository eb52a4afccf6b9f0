package simnode

import "github.com/virgate/virgate/internal/nvml"

// DeviceGetRemappedRows is NOT_SUPPORTED before Ampere.
func (n *Node) DeviceGetRemappedRows(d nvml.Device) (nvml.RemappedRows, error) {
	return askBoard(n, "DeviceGetRemappedRows", d, func(b *board) (nvml.RemappedRows, nvml.Return) {
		if b.architecture < nvml.Ampere {
			return nvml.RemappedRows{}, nvml.NotSupported
		}
		return b.rows, nvml.Success
	})
}

// DeviceGetRetiredPagesPendingStatus is NOT_SUPPORTED from Ampere on.
func (n *Node) DeviceGetRetiredPagesPendingStatus(d nvml.Device) (bool, error) {
	return askBoard(n, "DeviceGetRetiredPagesPendingStatus", d, func(b *board) (bool, nvml.Return) {
		if b.architecture >= nvml.Ampere {
			return false, nvml.NotSupported
		}
		return b.pagesPending, nvml.Success
	})
}

// repair does what waits for a reset.
func (b *board) repair() {
	if b.rows.Pending {
		b.rows.Pending = false
		b.rows.Uncorrectable++
	}
	b.pagesPending = false
}
