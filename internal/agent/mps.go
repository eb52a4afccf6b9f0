package agent

import (
	"cmp"
	"context"
	"maps"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// MPS runs the control daemons of NVIDIA's MPS, in another container: it is package internal/mps's
// Client.
type MPS interface {
	// Want says for which units daemons are wanted, for all of them. It does not wait. Until the
	// first call what the last program wanted is kept.
	Want(units []nodereport.MPSUnit)
	// States are the units that have a daemon or should have one; not connected while nobody
	// answers.
	States() (states []nodereport.MPSState, connected bool)
	// Watch is as in Node: it calls changed when States may answer otherwise.
	Watch(ctx context.Context, changed func()) error
}

// mpsDaemons are the daemons that are wanted, and how they are. The loop has all but wake and view.
type mpsDaemons struct {
	wake chan struct{}
	view atomic.Pointer[decide.MPS]

	wanted map[string]wantedDaemon
	// doubtful are units that were wanted and never told of, until when one may still start.
	doubtful map[string]time.Time
}

type wantedDaemon struct {
	unit nodereport.MPSUnit
	// shares is the number of shares to which its limits belong.
	shares int
	// told says that it was among the states.
	told bool
}

const (
	// mpsDoubt is longer than the time after which the states tell of a daemon that is wanted.
	mpsDoubt = 5 * time.Second
	// mpsPatience is how long the first lists wait for the states.
	mpsPatience = 2 * time.Second
)

// awaitMPS waits a moment to be told of the daemons that run already, so that nobody's shares are
// Unhealthy for that moment.
func (a *agent) awaitMPS(ctx context.Context) {
	if a.MPS == nil || len(a.plannedMPS(a.state.Load())) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, mpsPatience)
	defer cancel()
	_ = a.MPS.Watch(ctx, func() {
		if _, connected := a.MPS.States(); connected {
			cancel()
		}
	})
	a.followMPS(ctx)
}

// mpsLoop says which daemons are wanted until ctx ends. They run on after that, for the next run.
func (a *agent) mpsLoop(ctx context.Context) error {
	for {
		pause := settingsInterval
		if a.followMPS(ctx) {
			pause = releaseInterval
		}
		select {
		case <-a.mps.wake:
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
	}
}

// followMPS says whether to look again soon.
func (a *agent) followMPS(ctx context.Context) (pending bool) {
	s, served := a.state.Load(), a.Plugin.Status()
	last, m := a.mps.view.Load(), &a.mps
	next := &decide.MPS{States: last.States, Waits: map[string]string{}, Busy: map[string]bool{}, Shares: map[string]int{}}
	var states []nodereport.MPSState
	if states, next.Connected = a.MPS.States(); next.Connected {
		next.States = map[string]nodereport.MPSState{}
		for _, state := range states {
			next.States[state.ID] = state
			if want, is := m.wanted[state.ID]; is {
				want.told = true
				m.wanted[state.ID] = want
			}
			delete(m.doubtful, state.ID)
		}
	}
	wanted, byClaims := m.wanted, a.claimedDevices()
	pending = !s.planned || !served.Served
	if !pending {
		uses := mpsUses(served)
		a.addClaims(uses, s.gpus, byClaims)
		wanted, pending = a.chooseMPS(ctx, s, next, uses)
	}
	for id, want := range m.wanted {
		if _, still := wanted[id]; !still {
			// It is still wanted until MPS is told otherwise.
			if next.Busy[id], pending = true, true; !want.told {
				m.doubtful[id] = time.Now().Add(mpsDoubt)
			}
		}
	}
	for id, until := range m.doubtful {
		if time.Now().Before(until) {
			next.Busy[id], pending = true, true
		} else {
			delete(m.doubtful, id)
		}
	}
	for id, want := range wanted {
		next.Busy[id], next.Shares[id] = true, want.shares
	}
	for id := range next.States {
		next.Busy[id] = true
	}
	if a.DRA.Claims != nil {
		// First nobody gets a unit in another way, then who has got one until then, then daemons.
		if a.DRA.Claims.SetModes(next.FaultOfClaim); !maps.Equal(byClaims, a.claimedDevices()) {
			notify(m.wake)
			return true
		}
	}
	if s.planned && served.Served {
		m.wanted = wanted
		units := []nodereport.MPSUnit(nil)
		for _, id := range slices.Sorted(maps.Keys(wanted)) {
			units = append(units, wanted[id].unit)
		}
		a.MPS.Want(units)
	}
	if !reflect.DeepEqual(last, next) {
		m.view.Store(next)
		a.requestPlan()
	}
	return pending
}

// mpsUse is how the lists have a unit, without what nobody can use any more.
type mpsUse struct {
	// shares is the number of its shares by MPS; 0 for none. offered says that the plan has these,
	// held that a pod holds one, and others that the unit can be used in another way.
	shares                int
	offered, held, others bool
}

func mpsUses(served plugin.Status) map[string]mpsUse {
	uses := map[string]mpsUse{}
	for _, r := range served.Resources {
		for _, e := range r.Listed {
			if e.Vacated {
				continue
			}
			use := uses[e.Unit]
			if shares := e.Mode.Shares; shares > 0 {
				use.shares, use.offered = shares, use.offered || !e.Switching
			} else {
				use.others = true
			}
			uses[e.Unit] = use
		}
	}
	for _, holder := range served.Holders {
		for _, id := range holder.Devices {
			unit, _, _ := sharing.ParseDeviceID(id)
			if use := uses[unit]; use.shares > 0 && use.shares == sharing.ModeOf(id).Shares {
				use.held = true
				uses[unit] = use
			}
		}
	}
	return uses
}

// claimedDevice is a device that a claim has, or that it was given and did not get.
type claimedDevice struct {
	name string
	has  bool
}

// claimedDevices are by the units' places. A claim that was refused waits for its device to be
// possible: its unit is given to nobody else until then, so it says what becomes of one that
// nobody has.
func (a *agent) claimedDevices() map[string]claimedDevice {
	devices := map[string]claimedDevice{}
	if a.DRA.Claims == nil {
		return devices
	}
	view := a.DRA.Claims.View()
	add := func(c dra.Claim, has bool) {
		for _, r := range c.Results {
			place := dra.PlaceOf(r.Device)
			if _, known := devices[place]; !known && !r.Admin && view.Paths[place].ByDRA() {
				devices[place] = claimedDevice{r.Device, has}
			}
		}
	}
	for _, c := range view.Claims {
		add(c, true)
	}
	for _, uid := range slices.Sorted(maps.Keys(view.Refused)) {
		add(view.Refused[uid].Claim, false)
	}
	return devices
}

// addClaims adds how claims have units, and how they are offered to claims.
func (a *agent) addClaims(uses map[string]mpsUse, gpus []sharing.GPU, byClaims map[string]claimedDevice) {
	if a.DRA.Claims == nil {
		return
	}
	planned := a.dra.Planned()
	for id, place := range dra.Places(gpus) {
		use := uses[id]
		device, claimed := byClaims[place.Name]
		switch shares := dra.ModeOf(device.name).Shares; {
		case shares > 0:
			use.shares, use.offered, use.held = shares, true, device.has
		case claimed:
			use.others = true
		case use.shares == 0 && planned[id].MPS.Shares > 0:
			use.shares, use.offered = planned[id].MPS.Shares, true
		}
		uses[id] = use
	}
}

// plannedMPS are the units that are planned to be shared by MPS, whoever offers them.
func (a *agent) plannedMPS(s *state) map[string]sharing.Unit {
	units := a.dra.Planned()
	for _, r := range s.plan.Resources {
		for _, u := range r.Units {
			units[u.ID] = u
		}
	}
	maps.DeleteFunc(units, func(_ string, u sharing.Unit) bool { return u.MPS.Shares == 0 })
	return units
}

// chooseMPS says for which units daemons are wanted: for those that pods may have shares of by
// MPS. One is started when nobody uses the unit in another way, and stays until its last share is
// refused and nobody holds any.
func (a *agent) chooseMPS(ctx context.Context, s *state, view *decide.MPS, uses map[string]mpsUse) (wanted map[string]wantedDaemon, pending bool) {
	m, planned := &a.mps, a.plannedMPS(s)
	wanted = map[string]wantedDaemon{}
	for _, id := range slices.Sorted(maps.Keys(uses)) {
		use := uses[id]
		if use.shares == 0 {
			continue
		}
		want, is := m.wanted[id]
		unit, current := planned[id]
		current = current && unit.MPS.Shares == use.shares
		if current || !is {
			want.unit, want.shares = daemonFor(s.gpus, id, use.shares, unit, current), use.shares
		}
		_, runs := view.States[id]
		if !is && !runs && !use.held {
			if !use.offered || use.others {
				continue
			}
			if why := a.usedOtherwise(ctx, want.unit); why != "" {
				view.Waits[id] = why
				continue
			}
		}
		wanted[id] = want
	}
	for id := range planned {
		pending = pending || wanted[id] == wantedDaemon{}
	}
	for id := range wanted {
		_, is := planned[id]
		pending = pending || !is
	}
	return wanted, pending
}

// daemonFor is the daemon for a unit of so many shares. For one that is planned in another way
// now, what its containers may have is not known, so the daemon limits them to the whole unit.
func daemonFor(gpus []sharing.GPU, id string, shares int, unit sharing.Unit, current bool) nodereport.MPSUnit {
	if !current {
		unit = sharing.Unit{ID: id, GPU: sharing.GPUByUnit(gpus)[id], MPS: sharing.MPS{Shares: shares, Several: true}}
	}
	limit := unit.MPSCeiling()
	return nodereport.MPSUnit{ID: unit.ID, GPU: cmp.Or(unit.GPU, unit.ID), ThreadPercentage: limit.ThreadPercentage, PinnedMemory: limit.PinnedMemory}
}

// usedOtherwise says who uses a GPU of which nobody holds a share, or whose settings are still
// to be undone; empty for nobody. Of a partition the lists say enough.
func (a *agent) usedOtherwise(ctx context.Context, unit nodereport.MPSUnit) string {
	if unit.ID != unit.GPU {
		return ""
	}
	if a.DriverSettings.Store != nil && !a.gpuSettings.looked.Load() || slices.ContainsFunc((*a.gpuSettings.list.Load())[unit.GPU], func(s status.GPUSetting) bool { return s.Setting == "computeMode" }) {
		return "its compute mode is being set back"
	}
	users := a.usersOf(ctx, unit.GPU)
	if len(users) == 0 {
		return ""
	}
	return "in use by " + users[0]
}

// daemonsOf are the MPS daemons of the GPU's units.
func daemonsOf(v *decide.MPS, units []status.Unit) (list []nodereport.MPSState) {
	for _, u := range units {
		state, told := v.States[u.ID]
		switch {
		case !told:
			continue
		case !v.Connected:
			state.Phase, state.Reason = nodereport.MPSFailed, decide.MPSUnanswered
		}
		list = append(list, state)
	}
	return list
}
