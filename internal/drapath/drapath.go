// Package drapath leads units from the device plugin to DRA and back: a profile says which way a
// unit is to be offered, and Paths takes it there step by step, under its holders. nextPath is the
// rule. It also has the partitions made that claims get on demand.
//
// Which units a claim may have is package claims' to decide; who owns a unit is package decide's.
package drapath

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Driver is the driver of Dynamic Resource Allocation: package internal/dradriver's Driver.
type Driver interface {
	// Run serves the kubelet and the API server until ctx ends.
	Run(ctx context.Context) error
	// Publish says what is to be offered. It does not wait.
	Publish(slices []resourceapi.ResourceSlice)
	// State says how it goes. It does not wait.
	State() dra.DriverState
	// Allocated are the names of this node's devices that claims have been given, by the claim's
	// UID, as the API server knows it.
	Allocated(ctx context.Context) (map[string][]string, error)
}

// Options are what resources that are offered by Dynamic Resource Allocation need.
type Options struct {
	// Driver is nil where nothing is offered so.
	Driver Driver
	// Claims is the table of who has what by it.
	Claims *claims.Table
	// Node has what an offer says of the node, but for its GPUs and its plan.
	Node func() dra.Node
	// PCIeRoot is the root complex of the GPU at that PCI bus ID: "pci0000:3a"; empty if unknown.
	PCIeRoot func(busID string) string
	// Quiet is how long a scheduler may still give a device away that is not offered any
	// more; 2 s when 0.
	Quiet time.Duration
	// Orphans is the time between two looks for claims that have ended unheard; 10 min when 0.
	Orphans time.Duration
}

// Inputs are the GPUs and the profile that the loop decided by last.
type Inputs struct {
	GPUs []sharing.GPU
	// Profile is nil before the first; Planned says that it was planned for these GPUs.
	Profile *sharing.Profile
	Planned bool
	// Paused says that nothing is to be changed, because another program has the GPUs let go of.
	Paused bool
}

// Deps are the parts of the program that Paths works with.
type Deps struct {
	Plugin *plugin.Manager
	// Held says who holds which devices, as plugin.Kubelet.
	Held func(context.Context) ([]sharing.Allocation, error)
	MIG  *migchange.Reconciler
	// Partitioner is nil where no partitions are made.
	Partitioner migchange.Partitioner
	// Inputs must not wait.
	Inputs func() Inputs
	// Replan asks for another decision. It does not wait.
	Replan func()
	Logger *slog.Logger
}

// Paths leads units between the device plugin and DRA.
type Paths struct {
	Options
	deps Deps
	wake chan struct{}
	// units are those of the last plan, by place.
	units atomic.Pointer[map[string]decide.Unit]
	// offer is the last that was published. Only Publish uses it.
	offer *dra.Offer
	// geometries are what is known of the GPUs' partitions, by UUID.
	geometries atomic.Pointer[map[string]decide.Geometry]

	// Only Run uses the rest, and Load before it.

	// asked is when claims were last asked for at the API server.
	asked time.Time
	// refreshed are the units whose holders were last asked for again, at refreshedAt.
	refreshed   []string
	refreshedAt time.Time
	// lost says that nothing was found of what claims have, although they may have some.
	lost bool
}

// New returns the paths. The table of claims tells them of its changes from then on.
func New(o Options, deps Deps) *Paths {
	p := &Paths{
		Options: o,
		deps:    deps,
		wake:    make(chan struct{}, 1),
	}
	if o.Claims != nil {
		o.Claims.OnChange(func() { deps.Replan(); p.Wake() })
		o.Claims.OnMake(p.makeUnit)
		o.Claims.SetModes((&decide.MPS{}).FaultOfClaim)
	}
	return p
}

// Wake has the paths looked at again soon.
func (p *Paths) Wake() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

const (
	// quiet is longer than schedulers take to hear of a ResourceSlice and to write down what they
	// were about to give away. Pods that wait for something else before they are bound take longer:
	// theirs are late claims.
	quiet = 2 * time.Second
	// askInterval is the time between two questions who has been given a device that leaves.
	askInterval = 5 * time.Second
	// orphansInterval is the time between two looks for claims that have ended unheard.
	orphansInterval = 10 * time.Minute
	// waitInterval is the time between two looks at what units wait for, restInterval while none does.
	waitInterval = 500 * time.Millisecond
	restInterval = 30 * time.Second
)

// Facts returns what a decision needs to know of DRA; nil where this program serves no claims.
func (p *Paths) Facts(gpus []sharing.GPU) *decide.DRA {
	if p.Driver == nil {
		return nil
	}
	facts := decide.DRA{
		Node:  p.Node(),
		State: p.Driver.State(),
		View:  p.Claims.View(),
	}
	if p.PCIeRoot != nil {
		facts.Node.PCIeRoots = map[string]string{}
		for _, gpu := range gpus {
			facts.Node.PCIeRoots[gpu.UUID] = p.PCIeRoot(gpu.PCIBusID)
		}
	}
	if p.deps.Partitioner != nil {
		facts.Geometries = map[string]decide.Geometry{}
		if known := p.geometries.Load(); known != nil {
			facts.Geometries = *known
		}
	}
	return &facts
}

// SetUnits has the decision's units, and tells the table of claims of them.
func (p *Paths) SetUnits(all map[string]decide.Unit) {
	var list []claims.Unit
	for _, unit := range all {
		list = append(list, unit.Unit)
	}
	p.Claims.SetUnits(list)
	p.units.Store(&all)
}

// Units are those of the last decision, by place; nil before the first.
func (p *Paths) Units() map[string]decide.Unit {
	known := p.units.Load()
	if known == nil {
		return nil
	}
	return *known
}

// Publish publishes the decision's offer if it has changed; nil leaves what is published. Only
// the loop calls it.
func (p *Paths) Publish(offer *dra.Offer) {
	if offer == nil || reflect.DeepEqual(p.offer, offer) {
		return
	}
	p.offer = offer
	p.Driver.Publish(offer.Slices)
}

// Load takes over the last program's table. It is called with the lock, before the device plugin
// offers anything, and before Run.
func (p *Paths) Load() {
	if p.Driver == nil {
		return
	}
	known, err := p.Claims.Load()
	if err != nil {
		p.deps.Logger.Error(
			"the table of claims was lost, what pods show as held counts, or old CDI entries of claims stay", "error",
			err)
	}
	p.lost = !known
}

// Run leads units from the device plugin to DRA and back until ctx ends.
func (p *Paths) Run(ctx context.Context) error {
	orphans := time.NewTicker(cmp.Or(p.Orphans, orphansInterval))
	defer orphans.Stop()
	changed := p.deps.Plugin.Subscribe()
	for {
		pause := restInterval
		if p.follow(ctx) {
			pause = waitInterval
		}
		select {
		case <-p.wake:
		case <-orphans.C:
			p.dropOrphans(ctx)
		case <-changed:
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
	}
}

// follow takes each unit a step further on its path, and says whether one waits for something.
func (p *Paths) follow(ctx context.Context) (pending bool) {
	inputs := p.deps.Inputs()
	p.readGeometries(ctx, inputs)
	all := p.Units() // After the driver was asked, which can take long.
	if all == nil || !inputs.Planned || inputs.Paused {
		return true
	}
	view := p.Claims.View()
	// First withdrawn, then refused by Allocate, then withdrawn still, and only then the holders:
	// nobody gets a unit from the device plugin after these have been read.
	withdrawn := p.withdrawn(all, view.Paths)
	p.refuse(all, view.Paths, withdrawn)
	maps.DeleteFunc(withdrawn, func(unit string, _ bool) bool { return !p.deps.Plugin.Withdrawn(unit) })
	var held []sharing.Allocation
	if len(withdrawn) > 0 || p.lost {
		var err error
		held, err = p.deps.Held(ctx)
		if err != nil {
			return true
		}
	}
	if p.lost {
		if err := p.Claims.Adopt(held); err != nil {
			p.deps.Logger.Error("claims of the last run not taken over", "error", err)
			return true
		}
		p.lost, view = false, p.Claims.View()
	}
	next := p.next(ctx, view, all, withdrawn, held)
	paths := maps.Clone(view.Paths)
	maps.Copy(paths, next)
	if len(next) > 0 {
		// What the plugin gets back it may grant before it has it: a refusal fails a pod.
		p.refuse(all, paths, withdrawn)
		if err := p.Claims.SetPaths(next); err != nil {
			p.deps.Logger.Error("units stay with who offers them", "error", err)
			return true
		}
		p.log(next)
		p.deps.Replan()
	}
	for _, path := range paths {
		pending = pending || path == units.LeavingPlugin || path == units.LeavingDRA
	}
	return pending
}

// next are the paths that change now, by place. Withdrawn are the units that Allocate refuses, by
// UUID, held who has devices since.
func (p *Paths) next(
	ctx context.Context,
	view claims.View,
	all map[string]decide.Unit,
	withdrawn map[string]bool,
	held []sharing.Allocation,
) map[string]units.Path {
	late, holders := view.RefusedPlaces(), sharing.HoldersByUnit(held)
	unallocated := p.unallocated(ctx, view, all)
	next := map[string]units.Path{}
	for _, place := range slices.Concat(slices.Collect(maps.Keys(all)), slices.Collect(maps.Keys(view.Paths))) {
		unit, path := all[place], view.Paths[place]
		if unit.Follows() && !path.ByDRA() {
			continue // It goes where its GPU goes, and a claim may have it.
		}
		id := unit.PluginUnit()
		is := pathFacts{
			wanted:      unit.ForDRA,
			late:        late[place],
			vacated:     withdrawn[id] && !anyOtherThan(p.Claims.Driver(), holders[id]),
			partsLeft:   unit.With == "" || withoutPlugin(all, view.Paths, unit.GPU),
			unallocated: slices.Contains(unallocated, place),
		}
		if then := nextPath(path, is); then != path {
			next[place] = then
		}
	}
	return next
}

// withdrawn are the units on their way to DRA that the device plugin has withdrawn, by UUID.
func (p *Paths) withdrawn(all map[string]decide.Unit, paths map[string]units.Path) map[string]bool {
	withdrawn := map[string]bool{}
	var waits []string
	for place, unit := range all {
		switch {
		case paths[place] != units.LeavingPlugin:
		case p.deps.Plugin.Withdrawn(unit.PluginUnit()):
			withdrawn[unit.PluginUnit()] = true
		default:
			waits = append(waits, unit.PluginUnit())
		}
	}
	if p.refreshes(waits, time.Now()) {
		p.deps.Plugin.RefreshHolders(waits...) // One that the kubelet does not name may be gone.
	}
	return withdrawn
}

// refreshes says whether Run asks for these units' holders again: when other units wait than
// before, and otherwise once in waitInterval. The answer wakes Run, which would ask without
// end.
func (p *Paths) refreshes(waits []string, now time.Time) bool {
	slices.Sort(waits)
	if len(waits) == 0 || slices.Equal(waits, p.refreshed) && now.Sub(p.refreshedAt) < waitInterval {
		return false
	}
	p.refreshed, p.refreshedAt = waits, now
	return true
}

// anyOtherThan is true if one of the holders is not a claim of that driver.
func anyOtherThan(driver string, holders []sharing.Allocation) bool {
	return slices.ContainsFunc(holders,
		func(a sharing.Allocation) bool { return a.Claim == "" || a.Resource != driver })
}

// unallocated are the places of units that leave DRA and that no claim has: what is offered
// without them has been with the API server for a while, and it knows of no claim that was given
// one. A claim that is given one later still, by a scheduler that had not heard of it, has the
// device plugin give the unit up again: see follow.
func (p *Paths) unallocated(ctx context.Context, view claims.View, all map[string]decide.Unit) (free []string) {
	taken := map[string]bool{}
	take := func(devices []string) {
		for _, device := range devices {
			taken[dra.PlaceOf(device)] = true
		}
	}
	take(view.Held())
	for place, path := range view.Paths {
		if path == units.LeavingDRA && !all[place].ForDRA && !taken[place] && !decide.HasPart(taken, place) {
			free = append(free, place)
		}
	}
	since := p.Driver.State().Written
	if free == nil || since.IsZero() || time.Since(since) < cmp.Or(p.Quiet, quiet) ||
		time.Since(p.asked) < cmp.Or(p.Quiet, askInterval) {
		return nil
	}
	p.asked = time.Now()
	allocated, err := p.Driver.Allocated(ctx)
	if err != nil {
		p.deps.Logger.Warn("units stay with DRA: who was given them cannot be read", "error", err)
		return nil
	}
	for _, devices := range allocated {
		take(devices)
	}
	return slices.DeleteFunc(free, func(place string) bool {
		// A GPU may be changing for a claim that has ended meanwhile.
		return taken[place] || decide.HasPart(taken, place) || p.deps.MIG.Changing(all[place].GPU)
	})
}

// Users are the claims that have the GPU or a partition of it, and whose pods the kubelet does
// not show yet, or not any more.
func (p *Paths) Users(gpus []sharing.GPU, gpu string, held []sharing.Allocation) (list []string) {
	if p.Claims == nil {
		return nil
	}
	byPlace, gpuOf := p.Claims.View().HeldPlaces(), sharing.GPUByUnit(gpus)
	for id, place := range dra.Places(gpus) {
		c, is := byPlace[place.Name]
		if is && gpuOf[id] == gpu && !slices.ContainsFunc(held,
			func(a sharing.Allocation) bool { return a.Claim == c.Name && a.Namespace == c.Namespace }) {
			list = append(list, "claim "+c.String())
		}
	}
	slices.Sort(list)
	return list
}

// ByDRA are the UUIDs of the units that a claim may get at any moment.
func (p *Paths) ByDRA() (ids []string) {
	all := p.Units()
	if all == nil {
		return nil
	}
	paths := p.Claims.View().Paths
	for _, unit := range all {
		if unit.ByDRA(paths) {
			ids = append(ids, unit.PluginUnit())
		}
	}
	return ids
}

// Planned are the planned units that are not the device plugin's, by UUID.
func (p *Paths) Planned() map[string]sharing.Unit {
	planned := map[string]sharing.Unit{}
	all := p.Units()
	if all == nil {
		return planned
	}
	paths := p.Claims.View().Paths
	for place, unit := range all {
		if paths[place] != units.Plugin {
			planned[unit.ID] = unit.Planned
		}
	}
	return planned
}

// refuse has the device plugin refuse the units that are DRA's, and those withdrawn ones. Its
// plan does not have them either; this is for a plan that was made just before.
func (p *Paths) refuse(all map[string]decide.Unit, paths map[string]units.Path, withdrawn map[string]bool) {
	refused := map[string]string{}
	for unit, is := range withdrawn {
		if is {
			refused[unit] = isByDRA
		}
	}
	for _, unit := range all {
		if unit.ByDRA(paths) {
			refused[unit.PluginUnit()] = isByDRA
		}
	}
	p.deps.Plugin.SetRefusals(plugin.ByDRA, refused)
}

// isByDRA completes "the device …".
const isByDRA = "is offered by Dynamic Resource Allocation"

// dropOrphans ends the claims that are over and of which the kubelet has told nobody: it had lost
// its memory, or the node was away while the claim was deleted. The API server does not have the
// claim as allocated, and no pod here has it.
func (p *Paths) dropOrphans(ctx context.Context) {
	view := p.Claims.View()
	if len(view.Claims)+len(view.Refused) == 0 {
		return
	}
	allocated, err := p.Driver.Allocated(ctx)
	if err != nil {
		return
	}
	held, err := p.deps.Held(ctx)
	if err != nil {
		return
	}
	drop := func(c dra.Claim) {
		inUse := slices.ContainsFunc(held,
			func(a sharing.Allocation) bool { return a.Claim == c.Name && a.Namespace == c.Namespace })
		if allocated[c.UID] != nil || inUse {
			return
		}
		p.deps.Logger.Info("a claim has ended and the kubelet has not said so", "claim", c.String())
		if err := p.Claims.Unprepare(c); err != nil {
			p.deps.Logger.Error("claim not ended", "claim", c.String(), "error", err)
		}
	}
	for _, c := range view.Claims {
		drop(c)
	}
	for _, r := range view.Refused {
		drop(r.Claim)
	}
}

func (p *Paths) log(paths map[string]units.Path) {
	for _, place := range slices.Sorted(maps.Keys(paths)) {
		path := paths[place]
		if path == units.Plugin {
			path = "plugin"
		}
		p.deps.Logger.Info("unit is offered otherwise", "device", place, "path", string(path))
	}
}
