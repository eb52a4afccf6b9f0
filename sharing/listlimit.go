package sharing

// MostDevices is the largest number of devices that a resource has. The kubelet
// drops the stream of a plugin whose list passes 4 MiB, gRPC's default for
// received messages (kubernetes 1.36.3, pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go
// sets no other), and shows 0 devices from then on. At 80 bytes a device
// this is 3 MiB: the ID "MIG-GPU-<36 characters>/GI/CI::NNNN" of old drivers has
// 57, and 4 of framing; "Unhealthy" 11; a NUMA node 8 at most.
const MostDevices = 3 << 20 / 80

// listable returns the units of a resource that one list can hold, in order. A
// profile whose replicas are too many for any node does not get this far (configs
// refuses it); one that is so for this node, with more boards than were ever
// built, is obeyed as far as it goes.
func listable(name string, members []candidate, p Profile, notes *warnings) []Unit {
	units := make([]Unit, 0, len(members))
	left := MostDevices
	without := map[int]int{} // units by share
	for _, member := range members {
		unit := member.unit(p.Shares)
		if unit.Replicas > left {
			without[member.share]++
			continue
		}
		left -= unit.Replicas
		units = append(units, unit)
	}
	for i, share := range p.Shares {
		if count := without[i]; count > 0 {
			notes.addf("%s.replicas: %d of %d units with %d replicas are not offered as %s: the kubelet takes no list beyond 4 MiB, which is %d devices",
				share.Path, count, len(members), share.Replicas, name, MostDevices)
		}
	}
	return units
}
