package agent

import (
	"cmp"
	"context"
	"maps"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// DRA is the driver of Dynamic Resource Allocation: package internal/dradriver's Driver.
type DRA interface {
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

// draStatus is nil where nothing is offered so.
func (a *agent) draStatus() *status.DRA {
	if a.DRA.Driver == nil {
		return nil
	}
	view := a.DRA.Claims.View()
	status := &status.DRA{DriverState: a.DRA.Driver.State(), Paths: view.Paths, Claims: append([]dra.Claim{}, view.Claims...), Refused: []claims.Refused{}}
	for _, uid := range slices.Sorted(maps.Keys(view.Refused)) {
		status.Refused = append(status.Refused, view.Refused[uid])
	}
	return status
}

// DRAOptions are what resources that are offered by Dynamic Resource Allocation need.
type DRAOptions struct {
	// Driver is nil where nothing is offered so.
	Driver DRA
	// Claims is the table of who has what by it. Its Changed is WakeDRA.
	Claims *claims.Table
	// Calls measures the kubelet's calls for claims.
	Calls *nodemetrics.ClaimCalls
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

// draPaths is what the agent knows of the units' paths beside the table of claims.
type draPaths struct {
	wake chan struct{}
	// units are those of the last plan, by place.
	units atomic.Pointer[map[string]decide.Unit]
	// offer is the last that was published. Only the loop uses it.
	offer *dra.Offer
	// geometries are what is known of the GPUs' partitions, by UUID.
	geometries atomic.Pointer[map[string]decide.Geometry]
	// asked is when claims were last asked for at the API server. Only draLoop uses it.
	asked time.Time
	// refreshed are the units whose holders draLoop last asked for again, at refreshedAt. Only
	// draLoop uses them.
	refreshed   []string
	refreshedAt time.Time
	// lost says that nothing was found of what claims have, although they may have some.
	lost bool
}

const (
	// draQuiet is longer than schedulers take to hear of a ResourceSlice and to write down what they
	// were about to give away. Pods that wait for something else before they are bound take longer:
	// theirs are late claims.
	draQuiet = 2 * time.Second
	// draAllocated is the time between two questions who has been given a device that leaves.
	draAllocated = 5 * time.Second
	// draOrphans is the time between two looks for claims that have ended unheard.
	draOrphans = 10 * time.Minute
)

// draFacts returns what is known of DRA; nil where this program serves no claims.
func (a *agent) draFacts(gpus []sharing.GPU) *decide.DRA {
	o := a.DRA
	if o.Driver == nil {
		return nil
	}
	facts := decide.DRA{Node: o.Node(), State: o.Driver.State(), View: o.Claims.View()}
	if o.PCIeRoot != nil {
		facts.Node.PCIeRoots = map[string]string{}
		for _, gpu := range gpus {
			facts.Node.PCIeRoots[gpu.UUID] = o.PCIeRoot(gpu.PCIBusID)
		}
	}
	if a.Partitioner != nil {
		facts.Geometries = map[string]decide.Geometry{}
		if known := a.dra.geometries.Load(); known != nil {
			facts.Geometries = *known
		}
	}
	return &facts
}

// setUnits tells the table of claims which units the node has.
func (a *agent) setUnits(all map[string]decide.Unit) {
	var list []claims.Unit
	for _, unit := range all {
		list = append(list, unit.Unit)
	}
	a.DRA.Claims.SetUnits(list)
	a.dra.units.Store(&all)
}

// publishDRA publishes what has changed. Only the loop calls it.
func (a *agent) publishDRA(offer *dra.Offer) {
	if offer == nil || !a.serving.Load() || reflect.DeepEqual(a.dra.offer, offer) {
		return
	}
	a.dra.offer = offer
	a.DRA.Driver.Publish(offer.Slices)
}

// wakeDRA has the paths looked at again, and the offer made anew. It is for claims.Options.
func (a *agent) wakeDRA() {
	a.requestPlan()
	notify(a.dra.wake)
}

// loadClaims takes over the last program's table. It is called with the lock, before the device
// plugin offers anything.
func (a *agent) loadClaims() {
	o := a.DRA
	if o.Driver == nil {
		return
	}
	known, err := o.Claims.Load()
	if err != nil {
		a.Logger.Error("the table of claims was lost, what pods show as held counts, or old CDI entries of claims stay", "error", err)
	}
	a.dra.lost = !known
}

// draLoop leads units from the device plugin to DRA and back until ctx ends.
func (a *agent) draLoop(ctx context.Context) error {
	orphans := time.NewTicker(cmp.Or(a.DRA.Orphans, draOrphans))
	defer orphans.Stop()
	changed := a.Plugin.Subscribe()
	for {
		pause := settingsInterval
		if a.followDRA(ctx) {
			pause = releaseInterval
		}
		select {
		case <-a.dra.wake:
		case <-orphans.C:
			a.dropOrphans(ctx)
		case <-changed:
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
	}
}

// followDRA takes each unit a step further on its path, and says whether one waits for something.
func (a *agent) followDRA(ctx context.Context) (pending bool) {
	s, o := a.state.Load(), a.DRA
	a.readGeometries(ctx, s)
	known := a.dra.units.Load()
	if known == nil || !s.planned || s.pause.paused {
		return true
	}
	view := o.Claims.View()
	// First withdrawn, then refused by Allocate, then withdrawn still, and only then the holders:
	// nobody gets a unit from the device plugin after these have been read.
	withdrawn := a.withdrawnForDRA(*known, view.Paths)
	a.blockDRA(view.Paths, withdrawn)
	maps.DeleteFunc(withdrawn, func(unit string, _ bool) bool { return !a.Plugin.Withdrawn(unit) })
	var held []sharing.Allocation
	if len(withdrawn) > 0 || a.dra.lost {
		var err error
		if held, err = a.Kubelet.Held(ctx); err != nil {
			return true
		}
	}
	if a.dra.lost {
		if err := o.Claims.Adopt(held); err != nil {
			a.Logger.Error("claims of the last run not taken over", "error", err)
			return true
		}
		a.dra.lost, view = false, o.Claims.View()
	}
	next, late, holders := map[string]units.Path{}, view.RefusedPlaces(), sharing.HoldersByUnit(held)
	for place, unit := range *known {
		if unit.Follows() {
			continue
		}
		switch path := view.Paths[place]; {
		case path == units.Plugin && (unit.ForDRA || late[place]):
			next[place] = units.LeavingPlugin
		case path == units.LeavingPlugin && !unit.ForDRA && !late[place]:
			next[place] = units.Plugin
		case path == units.LeavingPlugin && unit.With != "" && !withoutPlugin(*known, view.Paths, unit.GPU):
		case path == units.LeavingPlugin && withdrawn[unit.PluginUnit()] && !anyOtherThan(o.Claims.Driver(), holders[unit.PluginUnit()]):
			if next[place] = units.DRA; !unit.ForDRA {
				next[place] = units.LeavingDRA // For the late claim alone.
			}
		case unit.ForDRA && path == units.LeavingDRA:
			next[place] = units.DRA
		}
	}
	for place, path := range view.Paths {
		if path == units.DRA && !(*known)[place].ForDRA {
			next[place] = units.LeavingDRA
		}
	}
	for _, place := range a.freeOfClaims(ctx, view, *known) {
		next[place] = units.Plugin
	}
	paths := maps.Clone(view.Paths)
	maps.Copy(paths, next)
	if len(next) > 0 {
		// What the plugin gets back it may grant before it has it: a refusal fails a pod.
		a.blockDRA(paths, withdrawn)
		if err := o.Claims.SetPaths(next); err != nil {
			a.Logger.Error("units stay with who offers them", "error", err)
			return true
		}
		a.logPaths(next)
		a.requestPlan()
	}
	for _, path := range paths {
		pending = pending || path == units.LeavingPlugin || path == units.LeavingDRA
	}
	return pending
}

// withdrawnForDRA are the units on their way to DRA that the device plugin has withdrawn.
func (a *agent) withdrawnForDRA(all map[string]decide.Unit, paths map[string]units.Path) map[string]bool {
	withdrawn := map[string]bool{}
	var waits []string
	for place, unit := range all {
		switch {
		case paths[place] != units.LeavingPlugin:
		case a.Plugin.Withdrawn(unit.PluginUnit()):
			withdrawn[unit.PluginUnit()] = true
		default:
			waits = append(waits, unit.PluginUnit())
		}
	}
	if a.dra.refreshes(waits, time.Now()) {
		a.Plugin.RefreshHolders(waits...) // One that the kubelet does not name may be gone.
	}
	return withdrawn
}

// refreshes says whether draLoop asks for these units' holders again: when other units wait than
// before, and otherwise once in releaseInterval. The answer wakes draLoop, which would ask without
// end.
func (d *draPaths) refreshes(waits []string, now time.Time) bool {
	slices.Sort(waits)
	if len(waits) == 0 || slices.Equal(waits, d.refreshed) && now.Sub(d.refreshedAt) < releaseInterval {
		return false
	}
	d.refreshed, d.refreshedAt = waits, now
	return true
}

// anyOtherThan is true if one of the holders is not a claim of that driver.
func anyOtherThan(driver string, holders []sharing.Allocation) bool {
	return slices.ContainsFunc(holders, func(a sharing.Allocation) bool { return a.Claim == "" || a.Resource != driver })
}

// freeOfClaims are the places of units that leave DRA and that no claim has: what is offered
// without them has been with the API server for a while, and it knows of no claim that was given
// one. A claim that is given one later still, by a scheduler that had not heard of it, has the
// device plugin give the unit up again: see followDRA.
func (a *agent) freeOfClaims(ctx context.Context, view claims.View, all map[string]decide.Unit) (free []string) {
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
	since := a.DRA.Driver.State().Written
	if free == nil || since.IsZero() || time.Since(since) < cmp.Or(a.DRA.Quiet, draQuiet) || time.Since(a.dra.asked) < cmp.Or(a.DRA.Quiet, draAllocated) {
		return nil
	}
	a.dra.asked = time.Now()
	allocated, err := a.DRA.Driver.Allocated(ctx)
	if err != nil {
		a.Logger.Warn("units stay with DRA: who was given them cannot be read", "error", err)
		return nil
	}
	for _, devices := range allocated {
		take(devices)
	}
	return slices.DeleteFunc(free, func(place string) bool {
		return taken[place] || decide.HasPart(taken, place) || a.mig.Changing(all[place].GPU) // For a claim that has ended meanwhile.
	})
}

// claimsOf are the claims that have the GPU or a partition of it, and whose pods the kubelet does
// not show yet, or not any more.
func (a *agent) claimsOf(gpus []sharing.GPU, gpu string, held []sharing.Allocation) (list []string) {
	if a.DRA.Claims == nil {
		return nil
	}
	byPlace, gpuOf := a.DRA.Claims.View().HeldPlaces(), sharing.GPUByUnit(gpus)
	for id, place := range dra.Places(gpus) {
		c, is := byPlace[place.Name]
		if is && gpuOf[id] == gpu && !slices.ContainsFunc(held, func(a sharing.Allocation) bool { return a.Claim == c.Name && a.Namespace == c.Namespace }) {
			list = append(list, "claim "+c.String())
		}
	}
	slices.Sort(list)
	return list
}

// unitsByDRA are the units that a claim may get at any moment.
func (a *agent) unitsByDRA() (ids []string) {
	if all := a.dra.units.Load(); all != nil {
		paths := a.DRA.Claims.View().Paths
		for _, unit := range *all {
			if unit.ByDRA(paths) {
				ids = append(ids, unit.PluginUnit())
			}
		}
	}
	return ids
}

// blockDRA has the device plugin refuse the units that are DRA's, and those withdrawn ones. Its
// plan does not have them either; this is for a plan that was made just before.
func (a *agent) blockDRA(paths map[string]units.Path, withdrawn map[string]bool) {
	refused := map[string]string{}
	for unit, is := range withdrawn {
		if is {
			refused[unit] = isByDRA
		}
	}
	for _, unit := range *a.dra.units.Load() {
		if unit.ByDRA(paths) {
			refused[unit.PluginUnit()] = isByDRA
		}
	}
	a.Plugin.SetRefusals(plugin.ByDRA, refused)
}

// isByDRA completes "the device …".
const isByDRA = "is offered by Dynamic Resource Allocation"

// dropOrphans ends the claims that are over and of which the kubelet has told nobody: it had lost
// its memory, or the node was away while the claim was deleted. The API server does not have the
// claim as allocated, and no pod here has it.
func (a *agent) dropOrphans(ctx context.Context) {
	view := a.DRA.Claims.View()
	if len(view.Claims)+len(view.Refused) == 0 {
		return
	}
	allocated, err := a.DRA.Driver.Allocated(ctx)
	if err != nil {
		return
	}
	held, err := a.Kubelet.Held(ctx)
	if err != nil {
		return
	}
	drop := func(c dra.Claim) {
		inUse := slices.ContainsFunc(held, func(a sharing.Allocation) bool { return a.Claim == c.Name && a.Namespace == c.Namespace })
		if allocated[c.UID] != nil || inUse {
			return
		}
		a.Logger.Info("a claim has ended and the kubelet has not said so", "claim", c.String())
		if err := a.DRA.Claims.Unprepare(c); err != nil {
			a.Logger.Error("claim not ended", "claim", c.String(), "error", err)
		}
	}
	for _, c := range view.Claims {
		drop(c)
	}
	for _, r := range view.Refused {
		drop(r.Claim)
	}
}

func (a *agent) logPaths(paths map[string]units.Path) {
	for _, place := range slices.Sorted(maps.Keys(paths)) {
		path := paths[place]
		if path == units.Plugin {
			path = "plugin"
		}
		a.Logger.Info("unit is offered otherwise", "device", place, "path", string(path))
	}
}
