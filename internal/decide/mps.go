package decide

import (
	"cmp"
	"fmt"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/units"
)

// MPS is what is known about the MPS daemons. It is not modified.
type MPS struct {
	Connected bool
	// States are the daemons' states by unit; while not connected, the last known ones.
	States map[string]nodereport.MPSState
	// Waits is what a unit's daemon waits for. Busy are the units that have a daemon or may have
	// one. Shares is the number of shares for which a daemon's limits were last requested.
	Waits  map[string]string
	Busy   map[string]bool
	Shares map[string]int
	// Closed are the released GPUs that virgate mps does not open.
	Closed map[string]bool
}

// MPSUnanswered is why nothing can be shared by MPS.
const MPSUnanswered = "no MPS daemon answers: this requires the container of virgate mps, which mps.enabled adds"

const daemonRuns = "its MPS daemon is still running"

// Reservations returns reservations that allow units with daemons to be used only as the daemons'
// shares. For a GPU with a daemon they include its partitions.
func (m *MPS) Reservations() (list []units.Reservation) {
	for id := range m.Busy {
		list = append(list, units.Reservation{
			Purpose: units.MPSDaemon,
			Only:    func(u units.Unit) bool { return u.UUID == id || u.GPU == id },
			Text:    daemonRuns,
		})
	}
	return list
}

// markMPSNotReady marks units shared by MPS until their daemon is ready, and units that are not
// shared by MPS while they still have a daemon.
func markMPSNotReady(f *Facts, d *Decision) {
	m := f.MPS
	if m == nil {
		return
	}
	reasons := map[string]string{}
	// dead are units whose shares of an earlier profile are still listed although they have no
	// daemon.
	dead := map[string]string{}
	unanswered := false
	for _, r := range d.Plan.Resources {
		for _, u := range r.Units {
			state := m.States[u.ID]
			if shares := m.Shares[u.ID]; shares != 0 && shares != u.MPS.Shares &&
				(!m.Connected || state.Phase != nodereport.MPSReady) {
				dead[u.ID] = "MPS daemon: it does not answer, and shares of an earlier profile are still listed"
			}
			if u.MPS.Shares == 0 && d.Owners[u.ID].ReservedFor(units.MPSDaemon) {
				reasons[u.ID] = daemonRuns
			}
			if why := m.notReady(u.ID, u.MPS.Shares); u.MPS.Shares > 0 && why != "" {
				reasons[u.ID] = why
			}
			unanswered = unanswered || u.MPS.Shares > 0 && !m.Connected
			// A ready daemon has a reason while programs wait for others.
			if (state.Phase == nodereport.MPSFailed || state.Phase == nodereport.MPSReady && state.Reason != "") &&
				m.Connected {
				d.warn(fmt.Sprintf("GPU %s (%s): MPS daemon: %s", u.Index, u.ID, state.Reason))
			}
		}
	}
	if unanswered {
		d.warn(MPSUnanswered)
	}
	d.Plan = d.Plan.MarkUnavailable(dead).MarkModeUnavailable(reasons)
}

// notReady returns why no container can have this many shares of the unit yet; empty if the daemon
// is ready.
func (m *MPS) notReady(id string, shares int) string {
	state, told := m.States[id]
	switch {
	case !m.Connected:
		return "MPS daemon: " + MPSUnanswered
	case m.Waits[id] != "":
		return "MPS daemon: it is not started yet: " + m.Waits[id]
	case !told:
		return "MPS daemon: it is not started yet"
	case state.Phase != nodereport.MPSReady:
		return "MPS daemon: " + cmp.Or(state.Reason, string(state.Phase))
	case m.Shares[id] != 0 && m.Shares[id] != shares:
		return "MPS daemon: it has the limits of other shares yet"
	}
	return ""
}

// FaultOfClaim returns why no claim gets the unit as this many MPS shares or, if shares is 0, in
// another way. It is for claims.Table: no claim gets shares of a daemon that is about to end.
func (m *MPS) FaultOfClaim(unit claims.Unit, shares int) string {
	if shares == 0 && (m.Busy[unit.ID] || m.Busy[unit.GPU]) {
		return daemonRuns
	}
	if shares == 0 {
		return ""
	}
	if why := m.notReady(unit.ID, shares); why != "" {
		return why
	}
	if m.Shares[unit.ID] != shares {
		return "MPS daemon: it is to end"
	}
	return ""
}
