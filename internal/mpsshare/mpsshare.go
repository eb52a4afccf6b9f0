// Package mpsshare says for which units daemons of NVIDIA's MPS are wanted: for those of which pods
// or claims may have shares by MPS. It starts and ends none itself.
package mpsshare

import (
	"cmp"
	"context"
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Daemons runs the control daemons of NVIDIA's MPS, in another container: it is package
// internal/mps's Client.
type Daemons interface {
	// Want says for which units daemons are wanted, for all of them. It does not wait. Until the
	// first call what the last program wanted is kept.
	Want(units []nodereport.MPSUnit)
	// States are the units that have a daemon or should have one; not connected while nobody
	// answers.
	States() (states []nodereport.MPSState, connected bool)
	// KeepClosed says which GPUs must not be opened, as Released, and reports whether none is any more. It
	// does not wait.
	KeepClosed(released map[string]int) bool
	// Watch calls changed when States may answer otherwise, at least once, and returns when ctx
	// ends.
	Watch(ctx context.Context, changed func()) error
}

// Claims are who has what by DRA.
type Claims interface {
	View() claims.View
	SetModes(mode claims.ModeFault)
}

// Options are what the choice of daemons needs.
type Options struct {
	// Daemons is nil where there can be none.
	Daemons Daemons
	// Claims is nil where nothing is offered by DRA.
	Claims Claims
	// Inputs are the GPUs and the last plan; false before the first one.
	Inputs func() (gpus []sharing.GPU, plan sharing.Plan, planned bool)
	// Lists are what the device plugin lists, and who holds it.
	Lists func() plugin.Status
	// ByDRA are the planned units that are not the device plugin's, by UUID. Who asks may change the
	// map.
	ByDRA func() map[string]sharing.Unit
	// Users are the pods and processes that use the GPU, or why that is not known.
	Users func(ctx context.Context, gpu string) []string
	// Released are the GPUs that are released or to be, by UUID, with the driver's index, -1 while
	// unknown; and Resets is how often the GPU was reset.
	Released func() map[string]int
	Resets   func(gpu string) int
	// ComputeModePending says that the GPU's compute mode is set, or may still be set back.
	ComputeModePending func(gpu string) bool
	// Changed is called when View answers otherwise. It must not wait.
	Changed func()
}

// Manager has the daemons that are wanted, and how they are. follow has all but wake and view.
type Manager struct {
	Options
	following sync.Mutex
	wake      chan struct{}
	view      atomic.Pointer[decide.MPS]

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
	// doubt is longer than the time after which the states tell of a daemon that is wanted.
	doubt = 5 * time.Second
	// patience is how long the first lists wait for the states.
	patience = 2 * time.Second
	// lookInterval is the time between two looks, waitInterval where something is waited for.
	lookInterval = 30 * time.Second
	waitInterval = 500 * time.Millisecond
	// mostPartitions is how many partitions a GPU has at most (NVIDIA's MIG User Guide).
	mostPartitions = 7
)

// New returns a manager that wants no daemon yet.
func New(options Options) *Manager {
	m := &Manager{
		Options:  options,
		wake:     make(chan struct{}, 1),
		wanted:   map[string]wantedDaemon{},
		doubtful: map[string]time.Time{},
	}
	m.view.Store(&decide.MPS{})
	return m
}

// View is what is known of the daemons. It must not be changed.
func (m *Manager) View() *decide.MPS { return m.view.Load() }

// Wake has Run look again. It does not wait.
func (m *Manager) Wake() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Await waits a moment to be told of the daemons that run already, so that nobody's shares are
// Unhealthy for that moment. It may be called while Run runs.
func (m *Manager) Await(ctx context.Context) {
	if m.Daemons == nil {
		return
	}
	if _, plan, _ := m.Inputs(); len(m.planned(plan)) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_ = m.Daemons.Watch(ctx, func() {
		if _, connected := m.Daemons.States(); connected {
			cancel()
		}
	})
	m.follow(ctx)
}

// Run says which daemons are wanted until ctx ends. They run on after that, for the next run.
func (m *Manager) Run(ctx context.Context) error {
	for {
		pause := lookInterval
		if m.follow(ctx) {
			pause = waitInterval
		}
		select {
		case <-m.wake:
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
	}
}

// follow says whether to look again soon.
func (m *Manager) follow(ctx context.Context) (pending bool) {
	m.following.Lock()
	defer m.following.Unlock()
	gpus, plan, planned := m.Inputs()
	served, last := m.Lists(), m.View()
	next := &decide.MPS{
		States: last.States,
		Waits:  map[string]string{},
		Busy:   map[string]bool{},
		Shares: map[string]int{},
	}
	var states []nodereport.MPSState
	states, next.Connected = m.Daemons.States()
	if next.Connected {
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
	wanted, byClaims := m.wanted, m.claimedDevices()
	pending = !planned || !served.Served
	if !pending {
		uses := usesOf(served)
		m.addClaims(uses, gpus, byClaims)
		wanted, pending = m.choose(ctx, gpus, plan, next, uses)
		for id, want := range wanted {
			want.unit.Vacant = next.States[id].CommonMemory && served.KubeletSeen && !uses[id].held
			wanted[id] = want
		}
	}
	for id, want := range m.wanted {
		if _, still := wanted[id]; !still {
			// It is still wanted until MPS is told otherwise.
			next.Busy[id], pending = true, true
			if !want.told {
				m.doubtful[id] = time.Now().Add(doubt)
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
	if m.Claims != nil {
		// First nobody gets a unit in another way, then who has got one until then, then daemons.
		if m.Claims.SetModes(next.FaultOfClaim); !maps.Equal(byClaims, m.claimedDevices()) {
			m.Wake()
			return true
		}
	}
	if planned && served.Served {
		m.wanted = wanted
		units := []nodereport.MPSUnit(nil)
		for _, id := range slices.Sorted(maps.Keys(wanted)) {
			units = append(units, wanted[id].unit)
		}
		m.Daemons.Want(units)
	}
	if !m.keepClosed(gpus, next) {
		pending = true
	}
	if !reflect.DeepEqual(last, next) {
		m.view.Store(next)
		m.Changed()
	}
	return pending
}

// keepClosed tells which released GPUs have no daemon any more, and says whether all of these are
// closed. One with a daemon is not told of yet: its compute mode is still to be set back.
func (m *Manager) keepClosed(gpus []sharing.GPU, next *decide.MPS) bool {
	released := m.Released()
	maps.DeleteFunc(released, func(gpu string, _ int) bool {
		return slices.ContainsFunc(sharing.UnitsOf(gpus, gpu), func(unit string) bool { return next.Busy[unit] })
	})
	if !m.Daemons.KeepClosed(released) {
		return false
	}
	next.Closed = map[string]bool{}
	for gpu := range released {
		next.Closed[gpu] = true
	}
	return true
}

// use is how the lists have a unit, without what nobody can use any more.
type use struct {
	// shares is the number of its shares by MPS; 0 for none. offered says that the plan has these,
	// held that a pod holds one, and others that the unit can be used in another way.
	shares                int
	offered, held, others bool
}

func usesOf(served plugin.Status) map[string]use {
	uses := map[string]use{}
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
func (m *Manager) claimedDevices() map[string]claimedDevice {
	devices := map[string]claimedDevice{}
	if m.Claims == nil {
		return devices
	}
	view := m.Claims.View()
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
func (m *Manager) addClaims(uses map[string]use, gpus []sharing.GPU, byClaims map[string]claimedDevice) {
	if m.Claims == nil {
		return
	}
	planned := m.ByDRA()
	for id, place := range dra.Places(gpus) {
		use := uses[id]
		device, claimed := byClaims[place.Name]
		switch shares := dra.ModeOf(device.name).Shares; {
		case shares > 0:
			use.shares = shares
			use.offered = true
			use.held = device.has
		case claimed:
			use.others = true
		case use.shares == 0 && planned[id].MPS.Shares > 0:
			use.shares, use.offered = planned[id].MPS.Shares, true
		}
		uses[id] = use
	}
}

// planned are the units that are planned to be shared by MPS, whoever offers them.
func (m *Manager) planned(plan sharing.Plan) map[string]sharing.Unit {
	units := m.ByDRA()
	for _, r := range plan.Resources {
		for _, u := range r.Units {
			units[u.ID] = u
		}
	}
	maps.DeleteFunc(units, func(_ string, u sharing.Unit) bool { return u.MPS.Shares == 0 })
	return units
}

// choose says for which units daemons are wanted: for those that pods may have shares of by
// MPS. One is started when nobody uses the unit in another way, and stays until its last share is
// refused and nobody holds any.
func (m *Manager) choose(
	ctx context.Context, gpus []sharing.GPU, plan sharing.Plan, view *decide.MPS, uses map[string]use,
) (wanted map[string]wantedDaemon, pending bool) {
	planned := m.planned(plan)
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
			want.unit, want.shares = m.daemonFor(gpus, id, use.shares, unit, current), use.shares
		}
		_, runs := view.States[id]
		if !is && !runs && !use.held {
			if !use.offered || use.others {
				continue
			}
			if why := m.usedOtherwise(ctx, want.unit); why != "" {
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
func (m *Manager) daemonFor(
	gpus []sharing.GPU,
	id string,
	shares int,
	unit sharing.Unit,
	current bool,
) nodereport.MPSUnit {
	if !current {
		unit = sharing.Unit{
			ID:  id,
			GPU: sharing.GPUByUnit(gpus)[id],
			MPS: sharing.MPS{Shares: shares, Several: true},
		}
	}
	limit := unit.MPSCeiling()
	parts := len(gpus)
	if unit.GPU != "" && unit.GPU != unit.ID {
		parts *= mostPartitions
	}
	return nodereport.MPSUnit{
		MemoryParts:      parts,
		ID:               unit.ID,
		GPU:              cmp.Or(unit.GPU, unit.ID),
		ThreadPercentage: limit.ThreadPercentage,
		PinnedMemory:     limit.PinnedMemory,
		Resets:           m.Resets(cmp.Or(unit.GPU, unit.ID)),
	}
}

// usedOtherwise says who uses a GPU of which nobody holds a share, or whose settings are still
// to be undone; empty for nobody. Of a partition the lists say enough.
func (m *Manager) usedOtherwise(ctx context.Context, unit nodereport.MPSUnit) string {
	if unit.ID != unit.GPU {
		return ""
	}
	if m.ComputeModePending(unit.GPU) {
		return "its compute mode is being set back"
	}
	users := m.Users(ctx, unit.GPU)
	if len(users) == 0 {
		return ""
	}
	return "in use by " + users[0]
}
