package plugin

import (
	"slices"
	"time"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc/codes"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// grant answers for one container. It reads only the generation, because pod admission on the whole
// node waits for it. The error is a gRPC status, whose message appears in the pod's event. sameUnit
// reports whether two of the devices are on one unit that is not shared by MPS.
func (g *generation) grant(
	ids []string,
	now time.Time,
) (response *api.ContainerAllocateResponse, sameUnit bool, err error) {
	name := g.resource.Name
	if len(ids) == 0 {
		return nil, false, refusef(Internal, codes.InvalidArgument, "%s: no device requested", name)
	}
	places := make([]int, 0, min(len(ids), len(g.uses))) // A request may list millions of IDs that do not exist.
	for _, id := range ids {
		place, ok := g.choices.Index(id)
		if !ok {
			return nil, false, refusef(UnknownDevice, codes.NotFound, "%s has no device %s", name, quoteID(id))
		}
		places = append(places, place)
	}
	slices.Sort(places) // So the same devices always give the same answer, and one unit's devices are adjacent.
	var units []sharing.Unit
	timeSliced, repeated := false, ""
	shares, several := 0, true // Both are for MPS only.
	for _, place := range places {
		e := &g.list.Entries[place]
		unit := g.units[e.Unit]
		if !unit.Health.Healthy() {
			return nil, false, refusef(UnhealthyDevice, codes.Unavailable, "%s: device %s must not be used: %s", name,
				e.ID, unit.Health.Reason)
		}
		if reason := g.withheld[e.Unit]; reason != "" && !e.Switching {
			return nil, false, refusef(NotReady, codes.Unavailable, "%s: device %s must not be used: %s", name, e.ID,
				reason)
		}
		if e.RefusesAllocate {
			return nil, false, closedDevice(name, e.ID)
		}
		if of := e.Mode.Shares; of > 0 {
			shares, several = of, several && unit.MPS.Several
		} else {
			timeSliced = timeSliced || e.Mode == sharing.TimeSliced
		}
		if last := len(units) - 1; last >= 0 && units[last].ID == e.Unit {
			repeated = e.Unit
			continue
		}
		units = append(units, unit)
	}
	if g.resource.FailRequestsGreaterThanOne && timeSliced && len(ids) > 1 {
		return nil, false, refusef(TooMany, codes.InvalidArgument,
			"%s is shared: a container may request 1, not %d (more shares give access to the same GPU, not more of "+
				"it; failRequestsGreaterThanOne is set)", name, len(ids))
	}
	if shares > 0 && !several && len(ids) > 1 {
		return nil, false, refusef(TooMany, codes.InvalidArgument,
			"%s is shared by MPS: a container may request 1, not %d (sharing.mps.failRequestsGreaterThanOne is set, "+
				"as it is by default)", name, len(ids))
	}
	if shares > 0 && len(units) > 1 {
		return nil, false, refusef(SeveralUnits, codes.ResourceExhausted,
			"%s is shared by MPS: a container's shares are all of one GPU, and none has %d free (a program talks to "+
				"the daemon of one GPU)", name, len(ids))
	}
	if g.resource.SpreadStrict && repeated != "" {
		return nil, false, refusef(SameUnit, codes.ResourceExhausted,
			"%s: %d devices were requested on distinct GPUs, but only devices of %d are free (two of them are on %s; "+
				"spread is strict)", name, len(ids), len(units), repeated)
	}
	if g.terms.grants.Nodes() {
		for _, u := range units {
			if len(g.terms.host.Nodes[u.ID]) == 0 {
				return nil, false, refusef(NotReady, codes.Unavailable,
					"%s: device %s must not be used: its device node is not known", name, u.ID)
			}
		}
	}
	// Record the grant only now that the call is going to succeed: from here on the devices count
	// as held.
	at := now.UnixNano()
	for _, place := range places {
		g.uses[place].granted.Store(at)
	}
	return grant.Allocation{
		Grants:    g.terms.grants,
		Host:      g.terms.host,
		Resource:  g.resource,
		IDs:       ids,
		Units:     units,
		MPSShares: shares,
		Granted:   len(slices.Compact(places)),
	}.Response(), repeated != "" && shares == 0, nil
}

// takeBack undoes the grant of a call that failed afterwards. The kubelet had chosen the devices as
// free, so no pod holds them from an earlier grant either.
func (g *generation) takeBack(ids []string, granted time.Time) {
	for _, id := range ids {
		place, _ := g.choices.Index(id)
		g.uses[place].granted.CompareAndSwap(granted.UnixNano(), 0)
	}
}
