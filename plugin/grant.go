package plugin

import (
	"cmp"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/sharing"
)

// grant answers for one container. It reads the generation and nothing else:
// the kubelet waits for it with the whole node's pod handling. The error is a
// gRPC status whose message ends up in the pod's event. sameUnit says that two of
// the devices are of one unit.
func (g *generation) grant(ids []string, now time.Time) (response *api.ContainerAllocateResponse, sameUnit bool, err error) {
	name := g.resource.Name
	if len(ids) == 0 {
		return nil, false, refusef(Internal, codes.InvalidArgument, "%s: no device requested", name)
	}
	units := make([]sharing.Unit, 0, len(ids))
	seen := make(map[string]struct{}, len(ids))
	replicas, repeated := false, ""
	for _, id := range ids {
		d, ok := g.devices[id]
		if !ok {
			return nil, false, refusef(UnknownDevice, codes.NotFound, "%s has no device %s", name, brief(id))
		}
		if d.unit.fault != "" {
			return nil, false, refusef(UnhealthyDevice, codes.Unavailable, "%s: device %s must not be used: %s", name, id, d.unit.fault)
		}
		replicas = replicas || id != d.unit.ID
		if _, again := seen[d.unit.ID]; again {
			repeated = d.unit.ID
			continue
		}
		seen[d.unit.ID] = struct{}{}
		units = append(units, d.unit.Unit)
	}
	if g.resource.OneShareOnly && replicas && len(ids) > 1 {
		return nil, false, refusef(TooMany, codes.InvalidArgument,
			"%s is shared: a container may request 1, not %d (more shares give access to the same GPU, not more of it; failRequestsGreaterThanOne is set)", name, len(ids))
	}
	if g.resource.SpreadStrict && repeated != "" {
		return nil, false, refusef(SameUnit, codes.ResourceExhausted,
			"%s: %d devices were requested on distinct GPUs, but only devices of %d are free (two of them are on %s; spread is strict)", name, len(ids), len(units), repeated)
	}
	if g.terms.grants.Nodes() {
		for _, u := range units {
			if len(g.terms.host.Nodes[u.ID]) == 0 {
				return nil, false, refusef(NotReady, codes.Unavailable, "%s: device %s must not be used: its device node is not known", name, u.ID)
			}
		}
	}
	slices.SortFunc(units, func(a, b sharing.Unit) int { return cmp.Compare(g.units[a.ID].place, g.units[b.ID].place) })
	// Only now, when the call is going to succeed, do the devices count as held.
	at := now.UnixNano()
	for _, id := range ids {
		g.devices[id].use.granted.Store(at)
	}
	return answer{
		grants: g.terms.grants, host: g.terms.host, resource: name, ids: ids,
		units: units, names: unitNames(units, g.resource.DeviceIDs),
	}.response(), repeated != "", nil
}
