// Package drapath moves units from the device plugin to DRA and back. A profile determines which of
// the two should offer a unit. Paths moves the unit there step by step and waits for its holders;
// nextPath has the rule. Paths also makes the partitions that claims get on demand.
//
// Package claims decides which units a claim may have; package decide decides who owns a unit.
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
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Driver is the driver of Dynamic Resource Allocation: package internal/dradriver's Driver.
type Driver interface {
	// Run serves the kubelet and the API server until ctx ends.
	Run(ctx context.Context) error
	// Publish sets the slices to offer. It does not wait.
	Publish(slices []resourceapi.ResourceSlice)
	// State returns the driver's state. It does not wait.
	State() dra.DriverState
	// Allocated returns the names of this node's devices that are allocated to claims, by the
	// claim's UID, as the API server knows them.
	Allocated(ctx context.Context) (map[string][]string, error)
}

// Options are what Paths needs to offer resources by Dynamic Resource Allocation.
type Options struct {
	// Driver is nil if nothing is offered by DRA.
	Driver Driver
	// Claims is the table of claims and the units that they have.
	Claims *claims.Table
	// Node returns an offer's information about the node, except its GPUs and its plan.
	Node func() dra.Node
	// PCIeRoot returns the root complex of the GPU with that PCI bus ID: "pci0000:3a"; empty if
	// unknown.
	PCIeRoot func(busID string) string
	// Quiet is how long a scheduler may still allocate a device that is no longer offered; 2 s when
	// 0.
	Quiet time.Duration
	// Orphans is the time between two searches for claims that ended without a call of the kubelet;
	// 10 min when 0.
	Orphans time.Duration
}

// Inputs are the GPUs and the profile of the loop's last decision.
type Inputs struct {
	GPUs []sharing.GPU
	// Profile is nil before the first one. Planned is true if it was planned for these GPUs.
	Profile *sharing.Profile
	Planned bool
	// Paused is true if nothing may be changed, because another program had the GPUs closed.
	Paused bool
}

// Deps are the parts of the program that Paths works with.
type Deps struct {
	Plugin *plugin.Manager
	// Held returns the holders of devices, like plugin.Kubelet.
	Held func(context.Context) ([]sharing.Allocation, error)
	MIG  *migchange.Reconciler
	// Partitioner is nil if no partitions are made.
	Partitioner migchange.Partitioner
	// Inputs must not wait.
	Inputs func() Inputs
	// Replan requests another decision. It does not wait.
	Replan func()
	Logger *slog.Logger
}

// Paths moves units between the device plugin and DRA.
type Paths struct {
	Options
	deps Deps
	wake wake.Signal
	// units are the units of the last plan, by unit name.
	units atomic.Pointer[map[string]decide.Unit]
	// offer is the last published offer. Only Publish uses it.
	offer *dra.Offer
	// geometries are the known possible partitions of the GPUs, by UUID.
	geometries atomic.Pointer[map[string]decide.Geometry]

	// Only Run uses the following fields, and Load before it.

	// asked is when the API server was last asked for claims.
	asked time.Time
	// refreshed are the units whose holders were last requested again, at refreshedAt.
	refreshed   []string
	refreshedAt time.Time
	// lost is true if the table of claims was lost, so claims may have units that are not known.
	lost bool
}

// New returns the paths. From then on, the table of claims notifies them of its changes.
func New(o Options, deps Deps) *Paths {
	p := &Paths{
		Options: o,
		deps:    deps,
		wake:    wake.NewSignal(),
	}
	if o.Claims != nil {
		o.Claims.OnChange(func() { deps.Replan(); p.Wake() })
		o.Claims.OnMake(p.makeUnit)
		o.Claims.SetModes((&decide.MPS{}).FaultOfClaim)
	}
	return p
}

// Wake makes Run check the paths again soon.
func (p *Paths) Wake() {
	p.wake.Notify()
}

const (
	// quiet is longer than schedulers need to learn of a ResourceSlice and to record allocations
	// that were under way. A pod that waits for something else before it is bound may take longer:
	// its claim is a late claim.
	quiet = 2 * time.Second
	// askInterval is the time between two requests for the claims that were allocated a leaving
	// device.
	askInterval = 5 * time.Second
	// orphansInterval is the time between two searches for claims that ended without a call of the
	// kubelet.
	orphansInterval = 10 * time.Minute
	// waitInterval is the time between two checks while units wait for something, restInterval
	// while none does.
	waitInterval = 500 * time.Millisecond
	restInterval = 30 * time.Second
)

// Facts returns a decision's facts about DRA; nil if this program serves no claims.
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

// SetUnits stores the decision's units, and passes them to the table of claims.
func (p *Paths) SetUnits(all map[string]decide.Unit) {
	var list []claims.Unit
	for _, unit := range all {
		list = append(list, unit.Unit)
	}
	p.Claims.SetUnits(list)
	p.units.Store(&all)
}

// Units returns the units of the last decision, by unit name; nil before the first.
func (p *Paths) Units() map[string]decide.Unit {
	known := p.units.Load()
	if known == nil {
		return nil
	}
	return *known
}

// Publish publishes the decision's offer if it has changed; nil leaves the published offer
// unchanged. Only the loop calls it.
func (p *Paths) Publish(offer *dra.Offer) {
	if offer == nil || reflect.DeepEqual(p.offer, offer) {
		return
	}
	p.offer = offer
	p.Driver.Publish(offer.Slices)
}

// Load takes over the last program's table. It must be called with the node's lock held, before the
// device plugin offers anything and before Run.
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

// Run moves units from the device plugin to DRA and back until ctx ends.
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
			p.dropStaleClaims(ctx)
		case <-changed:
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
	}
}

// follow moves each unit one step further on its path. pending is true if a unit waits for
// something.
func (p *Paths) follow(ctx context.Context) (pending bool) {
	inputs := p.deps.Inputs()
	p.readGeometries(ctx, inputs)
	all := p.Units() // Read after the driver, which can take long to answer.
	if all == nil || !inputs.Planned || inputs.Paused {
		return true
	}
	view := p.Claims.View()
	// Order: the device plugin withdraws a unit, Allocate refuses it, the unit is checked again to
	// be withdrawn, and only then the holders are read. From then on, no pod can get the unit from
	// the device plugin.
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
		// Stop refusing units before they are the plugin's again: the plugin may grant them a
		// little too early, but a refusal fails a pod.
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

// next returns the paths that change now, by unit name. withdrawn are the units that Allocate refuses,
// by UUID; held are the holders read after that.
func (p *Paths) next(
	ctx context.Context,
	view claims.View,
	all map[string]decide.Unit,
	withdrawn map[string]bool,
	held []sharing.Allocation,
) map[string]units.Path {
	late, holders := view.RefusedUnits(), sharing.HoldersByUnit(held)
	unallocated := p.unallocated(ctx, view, all)
	next := map[string]units.Path{}
	for _, unitName := range slices.Concat(slices.Collect(maps.Keys(all)), slices.Collect(maps.Keys(view.Paths))) {
		unit, path := all[unitName], view.Paths[unitName]
		if unit.Follows() && !path.ByDRA() {
			continue // It follows its GPU, and a claim may have it.
		}
		id := unit.PluginUnit()
		is := pathFacts{
			wanted:      unit.ForDRA,
			late:        late[unitName],
			vacated:     withdrawn[id] && !anyOtherThan(p.Claims.Driver(), holders[id]),
			partsLeft:   unit.Parent == "" || withoutPlugin(all, view.Paths, unit.GPU),
			unallocated: slices.Contains(unallocated, unitName),
		}
		if then := nextPath(path, is); then != path {
			next[unitName] = then
		}
	}
	return next
}

// withdrawn returns the units on their way to DRA that the device plugin has withdrawn, by UUID.
func (p *Paths) withdrawn(all map[string]decide.Unit, paths map[string]units.Path) map[string]bool {
	withdrawn := map[string]bool{}
	var waits []string
	for unitName, unit := range all {
		switch {
		case paths[unitName] != units.LeavingPlugin:
		case p.deps.Plugin.Withdrawn(unit.PluginUnit()):
			withdrawn[unit.PluginUnit()] = true
		default:
			waits = append(waits, unit.PluginUnit())
		}
	}
	if p.refreshes(waits, time.Now()) {
		p.deps.Plugin.RefreshHolders(waits...) // A holder that the kubelet does not name may be gone.
	}
	return withdrawn
}

// refreshes reports whether Run must request these units' holders again: if they differ from the
// units before, and otherwise once per waitInterval. The limit is needed because the answer wakes
// Run, which would then request them endlessly.
func (p *Paths) refreshes(waits []string, now time.Time) bool {
	slices.Sort(waits)
	if len(waits) == 0 || slices.Equal(waits, p.refreshed) && now.Sub(p.refreshedAt) < waitInterval {
		return false
	}
	p.refreshed, p.refreshedAt = waits, now
	return true
}

// anyOtherThan reports whether one of the holders is not a claim of that driver.
func anyOtherThan(driver string, holders []sharing.Allocation) bool {
	return slices.ContainsFunc(holders,
		func(a sharing.Allocation) bool { return a.Claim == "" || a.Resource != driver })
}

// unallocated returns the names of units that are leaving DRA and that no claim has. The API
// server has had the offer without them for a while, and knows of no claim that was allocated one.
// If a scheduler that did not know yet allocates one even later, the device plugin gives the unit
// up again: see follow.
func (p *Paths) unallocated(ctx context.Context, view claims.View, all map[string]decide.Unit) (free []string) {
	taken := map[string]bool{}
	take := func(devices []string) {
		for _, device := range devices {
			taken[dra.UnitNameOf(device)] = true
		}
	}
	take(view.Held())
	for unitName, path := range view.Paths {
		if path == units.LeavingDRA && !all[unitName].ForDRA && !taken[unitName] && !decide.HasPart(taken, unitName) {
			free = append(free, unitName)
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
	return slices.DeleteFunc(free, func(unitName string) bool {
		// The GPU may be changing for a claim that has ended meanwhile.
		return taken[unitName] || decide.HasPart(taken, unitName) || p.deps.MIG.Changing(all[unitName].GPU)
	})
}

// Users returns the claims that have the GPU or a partition of it, and whose pods the kubelet does
// not list yet or no longer lists.
func (p *Paths) Users(gpus []sharing.GPU, gpu string, held []sharing.Allocation) (list []string) {
	if p.Claims == nil {
		return nil
	}
	byName, gpuOf := p.Claims.View().HeldUnits(), sharing.GPUByUnit(gpus)
	for id, named := range dra.UnitNames(gpus) {
		c, is := byName[named.Name]
		if is && gpuOf[id] == gpu && !slices.ContainsFunc(held,
			func(a sharing.Allocation) bool { return a.Claim == c.Name && a.Namespace == c.Namespace }) {
			list = append(list, "claim "+c.String())
		}
	}
	slices.Sort(list)
	return list
}

// ByDRA returns the UUIDs of the units that a claim may get at any moment.
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

// Planned returns the planned units that are not the device plugin's, by UUID.
func (p *Paths) Planned() map[string]sharing.Unit {
	planned := map[string]sharing.Unit{}
	all := p.Units()
	if all == nil {
		return planned
	}
	paths := p.Claims.View().Paths
	for unitName, unit := range all {
		if paths[unitName] != units.Plugin {
			planned[unit.ID] = unit.Planned
		}
	}
	return planned
}

// refuse makes the device plugin refuse the units that are DRA's, and the withdrawn ones. The
// plugin's plan does not have them either, but it may still use a plan made just before.
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

// isByDRA completes a message that begins with "the device …".
const isByDRA = "is offered by Dynamic Resource Allocation"

// dropStaleClaims ends claims that are over although the kubelet never said so: it had lost its state,
// or the node was away while the claim was deleted. Such a claim is not allocated in the API
// server, and no pod on this node has it.
func (p *Paths) dropStaleClaims(ctx context.Context) {
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
	for _, unitName := range slices.Sorted(maps.Keys(paths)) {
		path := paths[unitName]
		if path == units.Plugin {
			path = "plugin"
		}
		p.deps.Logger.Info("unit is offered otherwise", "device", unitName, "path", string(path))
	}
}
