// Package mpsshare decides which units need a daemon of NVIDIA's MPS: those whose MPS shares pods
// or claims may have. It starts and ends no daemon itself.
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
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Daemons runs NVIDIA's MPS control daemons, in another container. The implementation is the Client
// of package internal/mps.
type Daemons interface {
	// Run does the work until ctx ends.
	Run(ctx context.Context) error
	// Want sets the complete list of units that need a daemon. It does not wait. Until the first
	// call, the list of an earlier run stays in force.
	Want(units []nodereport.MPSUnit)
	// States returns the units that have a daemon or should have one. connected is false while no
	// supervisor answers.
	States() (states []nodereport.MPSState, connected bool)
	// KeepClosed sets which GPUs must not be opened, as in Options.Released, and reports whether
	// all of them are closed now. It does not wait.
	KeepClosed(released map[string]int) bool
	// Watch calls changed when the result of States may have changed, and at least once. It returns
	// when ctx ends.
	Watch(ctx context.Context, changed func()) error
}

// Claims knows which claims have which devices by DRA.
type Claims interface {
	View() claims.View
	SetModes(mode claims.ModeFault)
}

// Options are the dependencies of a Manager.
type Options struct {
	// Daemons is nil if there can be no daemons.
	Daemons Daemons
	// Claims is nil if nothing is offered by DRA.
	Claims Claims
	// Inputs returns the GPUs and the last plan; planned is false before the first plan.
	Inputs func() (gpus []sharing.GPU, plan sharing.Plan, planned bool)
	// Lists returns what the device plugin lists and which pods hold it.
	Lists func() plugin.Status
	// ByDRA returns the planned units that the device plugin does not offer, by UUID. The caller
	// may change the map.
	ByDRA func() map[string]sharing.Unit
	// Users returns the pods and processes that use the GPU, or why they are not known.
	Users func(ctx context.Context, gpu string) []string
	// Released returns the GPUs that are released or about to be, by UUID, with the driver's index,
	// or -1 while it is unknown. Resets returns how often the GPU was reset.
	Released func() map[string]int
	Resets   func(gpu string) int
	// ComputeModePending reports whether the GPU's compute mode is set, or may still have to be
	// restored.
	ComputeModePending func(gpu string) bool
	// Changed is called when the result of View changes. It must not wait.
	Changed func()
}

// Manager keeps the list of wanted daemons, and their states. Only follow uses its fields, except
// wake and view.
type Manager struct {
	Options
	following sync.Mutex
	wake      wake.Signal
	view      atomic.Pointer[decide.MPS]

	wanted map[string]wantedDaemon
	// doubtful are units that were wanted but never showed up in the states, with the time until
	// which their daemon may still start.
	doubtful map[string]time.Time
}

type wantedDaemon struct {
	unit nodereport.MPSUnit
	// shares is the number of shares for which its limits were computed.
	shares int
	// told is true once it has been among the states.
	told bool
}

const (
	// doubt is longer than the states take to show a daemon that is wanted.
	doubt = 5 * time.Second
	// patience is how long the first lists wait for the states.
	patience = 2 * time.Second
	// lookInterval is the time between two checks, waitInterval the time while something is
	// pending.
	lookInterval = 30 * time.Second
	waitInterval = 500 * time.Millisecond
	// mostPartitions is the largest number of partitions on a GPU (NVIDIA's MIG User Guide).
	mostPartitions = 7
)

// New returns a manager that wants no daemon yet.
func New(options Options) *Manager {
	m := &Manager{
		Options:  options,
		wake:     wake.NewSignal(),
		wanted:   map[string]wantedDaemon{},
		doubtful: map[string]time.Time{},
	}
	m.view.Store(&decide.MPS{})
	return m
}

// View returns what is known of the daemons. The caller must not change it.
func (m *Manager) View() *decide.MPS { return m.view.Load() }

// Wake makes Run check again. It does not wait.
func (m *Manager) Wake() {
	m.wake.Notify()
}

// Await waits a moment for the states of the daemons that already run, so that no shares are
// Unhealthy until then. It may be called while Run runs.
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

// Run keeps the list of wanted daemons up to date until ctx ends. The daemons run on after that,
// for the next run.
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

// follow updates the list of wanted daemons and the view. It reports whether to check again soon.
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
			// Until Want gets the new list, the daemon is still wanted.
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
		// The order matters: first keep new claims off units that are about to change, then check
		// whether a claim got one in the meantime, and only then start or end daemons.
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

// keepClosed tells the supervisor which released GPUs have no daemon any more, and reports whether
// all of these are closed. A GPU with a daemon is left out for now: its compute mode still has to
// be restored.
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

// use is how the lists show a unit. Devices that are out of use do not count.
type use struct {
	// shares is the number of its shares by MPS, 0 for none. offered is true if the plan has these
	// shares, held if a pod holds one, and others if the unit can be used in another way.
	shares                int
	offered, held, others bool
}

func usesOf(served plugin.Status) map[string]use {
	uses := map[string]use{}
	for _, r := range served.Resources {
		for _, e := range r.Listed {
			if e.Unused {
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

// claimedDevice is a device that a claim has, or one that was allocated to a claim that Virgate
// refused.
type claimedDevice struct {
	name string
	has  bool
}

// claimedDevices returns the claimed devices by the names of their units. A refused claim waits
// until its device is possible, and nothing else gets the unit until then. Such a claim therefore
// decides how a unit that no claim has will be used.
func (m *Manager) claimedDevices() map[string]claimedDevice {
	devices := map[string]claimedDevice{}
	if m.Claims == nil {
		return devices
	}
	view := m.Claims.View()
	add := func(c dra.Claim, has bool) {
		for _, r := range c.Results {
			unitName := dra.UnitNameOf(r.Device)
			if _, known := devices[unitName]; !known && !r.Admin && view.Paths[unitName].ByDRA() {
				devices[unitName] = claimedDevice{r.Device, has}
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

// addClaims adds how claims use units, and how units are offered to claims.
func (m *Manager) addClaims(uses map[string]use, gpus []sharing.GPU, byClaims map[string]claimedDevice) {
	if m.Claims == nil {
		return
	}
	planned := m.ByDRA()
	for id, named := range dra.UnitNames(gpus) {
		use := uses[id]
		device, claimed := byClaims[named.Name]
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

// planned returns the units that are planned to be shared by MPS, both by the device plugin and by
// DRA.
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

// choose returns the wanted daemons: one for each unit whose MPS shares pods may have. A daemon is
// started when nothing uses the unit in another way. It stays until the unit's last share is
// refused and no pod holds one.
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

// daemonFor returns the daemon for a unit with that many shares. If the unit is now planned in
// another way (current is false), the limits of its containers are not known, so the daemon only
// limits them to the whole unit.
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

// usedOtherwise returns why a GPU of which no pod holds a share cannot get a daemon yet: what uses
// it, or that its compute mode still has to be restored. It returns "" if nothing does. For a
// partition the lists are enough.
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
