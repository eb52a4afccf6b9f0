package simnode

import (
	"fmt"

	"github.com/virgate/virgate/internal/nvml"
)

// switches is the number of NVSwitches on a simulated fabric; a board's links
// are spread over all of them. (A DGX A100 has six, later ones fewer.)
const switches = 6

// DeviceGetTopologyCommonAncestor is a level by NUMA node alone.
func (n *Node) DeviceGetTopologyCommonAncestor(a, b nvml.Device) (nvml.TopologyLevel, error) {
	const call = "DeviceGetTopologyCommonAncestor"
	other, err := askBoard(n, call, b, func(b *board) (*board, nvml.Return) { return b, nvml.Success })
	if err != nil {
		return 0, err
	}
	return askBoard(n, call, a, func(b *board) (nvml.TopologyLevel, nvml.Return) {
		switch {
		case b == other:
			return nvml.TopologyInternal, nvml.Success
		case b.numaNode == other.numaNode && b.numaNode >= 0:
			return nvml.TopologyNode, nvml.Success
		}
		return nvml.TopologySystem, nvml.Success
	})
}

// DeviceGetNvLinkState is NOT_SUPPORTED on a model without NVLink. The links of
// a board that has the fabric to itself are inactive.
func (n *Node) DeviceGetNvLinkState(d nvml.Device, link int) (bool, error) {
	return askBoard(n, "DeviceGetNvLinkState", d, func(b *board) (bool, nvml.Return) {
		code := b.answersLink(link)
		return code == nvml.Success && n.fabric(), code
	})
}

// DeviceGetNvLinkRemotePciInfo is the switch behind the link, NOT_FOUND behind
// an inactive one.
func (n *Node) DeviceGetNvLinkRemotePciInfo(d nvml.Device, link int) (nvml.PCIInfo, error) {
	return askBoard(n, "DeviceGetNvLinkRemotePciInfo", d, func(b *board) (nvml.PCIInfo, nvml.Return) {
		code := b.answersLink(link)
		switch {
		case code != nvml.Success:
			return nvml.PCIInfo{}, code
		case !n.fabric():
			return nvml.PCIInfo{}, nvml.NotFound
		}
		return nvml.PCIInfo{BusID: fmt.Sprintf("%08X:%02X:00.0", switchDomain, link%switches)}, nvml.Success
	})
}

// switchDomain is the PCI domain of the switches, where no board ever is.
const switchDomain = 0x100

func (b *board) answersLink(link int) nvml.Return {
	switch {
	case b.links == 0:
		return nvml.NotSupported
	case link < 0 || link >= b.links:
		return nvml.InvalidArgument
	}
	return nvml.Success
}

// fabric says that at least two boards have NVLinks.
func (n *Node) fabric() bool {
	linked := 0
	for _, b := range n.boards {
		if b.links > 0 {
			linked++
		}
	}
	return linked > 1
}
