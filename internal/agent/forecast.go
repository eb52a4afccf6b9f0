package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// forecaster predicts this node's offer for another label of its Node. It changes nothing.
type forecaster struct {
	*current
	nodeName    string
	config      ConfigSource
	plugin      *plugin.Manager
	partitioner migchange.Partitioner
	mig         *migchange.Reconciler
	releases    *release.Manager
	dra         *drapath.Paths
	samples     *sampler
	// mayReset and mayEvict are as in decide.Facts.
	mayReset, mayEvict bool
}

func newForecaster(a *agent) *forecaster {
	return &forecaster{
		current:     &a.current,
		nodeName:    a.NodeName,
		config:      a.ConfigSource,
		plugin:      a.Plugin,
		partitioner: a.Partitioner,
		mig:         a.mig,
		releases:    a.releases,
		dra:         a.dra,
		samples:     a.samples,
		mayReset:    a.Releases.Reset != nil,
		mayEvict:    a.Pods.Evict != nil,
	}
}

// forecast returns what this node would become if its Node had that label.
func (c *forecaster) forecast(ctx context.Context, label, value string) nodereport.Forecast {
	unknown := func(format string, arguments ...any) nodereport.Forecast {
		return nodereport.Forecast{
			Node:      c.nodeName,
			Unknown:   fmt.Sprintf(format, arguments...),
			Resources: []nodereport.ForecastResource{},
		}
	}
	s := c.state.Load()
	held, known := c.samples.readHolders(ctx, lookPause)
	switch {
	case !c.serving.Load():
		return unknown("this Virgate does not serve the node")
	case s.unread != nil:
		return unknown("its GPUs cannot be read: %v", s.unread)
	case !s.planned:
		return unknown("it has no plan yet")
	case s.pause.by.Any():
		return unknown("%s", s.pause.by.Text())
	case !known:
		return unknown("what pods hold cannot be read")
	}
	selected, err := c.config.WithLabel(label, value)
	if errors.Is(err, configs.ErrPending) {
		return unknown("the profile is %v", err)
	}
	if err == nil && (s.profile == nil || selected.Generation != s.profile.Generation) {
		err = selected.CheckNode(s.gpus)
	}
	f := nodereport.Forecast{Node: c.nodeName, LeftTo: selected.Profile.MIG.LeftTo}
	var then, after sharing.Plan
	listed := c.plugin.Status().Resources
	nowBy, thenBy := shareIn(listed), modeFunc(byID)
	if err != nil {
		f.Unfit = strings.Split(err.Error(), "\n")
	} else {
		then, after, err = c.foresee(ctx, s, selected.Profile, held, nowBy, &f)
		if err != nil {
			return unknown("%v", err)
		}
	}
	now := sharing.Plan{}
	for _, r := range listed {
		resource := sharing.Resource{Name: r.Name}
		for _, e := range r.Listed {
			resource.Devices = append(resource.Devices, e.Device)
		}
		now.Resources = append(now.Resources, resource)
	}
	if f.Unfit == nil && len(after.Resources) == 0 && len(now.Resources) > 0 && !selected.Profile.DRA.All &&
		len(selected.Profile.DRA.Resources) == 0 {
		f.Unfit = []string{strings.TrimSuffix("the node would have nothing to offer: "+
			strings.Join(after.Warnings, "; "), ": ")}
	}
	if f.Unfit != nil {
		then = now
		after = now
		thenBy = nowBy
	}
	f.Resources = foreseenResources(now, then, after, nowBy, thenBy)
	return f
}

// foresee plans with the profile. then is the plan when everything is done that need not wait for
// pods; after is the plan when those pods have ended, too. It adds the obstacles to the forecast.
func (c *forecaster) foresee(
	ctx context.Context, s *state, profile sharing.Profile, held []sharing.Allocation, mode modeFunc,
	f *nodereport.Forecast,
) (then, after sharing.Plan, err error) {
	gpusThen, gpusAfter := slices.Clone(s.gpus), slices.Clone(s.gpus)
	released := c.releases.Released()
	// closed are the units that are kept free for the layout; inTheWay is why the layout waits for
	// a unit.
	closed, inTheWay := map[string]bool{}, map[string]string{}
	var ids []sharing.GPUID
	for i, gpu := range s.gpus {
		if !profile.MIG.Manage || profile.MIG.Name == "" || gpu.DriverIndex == sharing.NotListed || released[gpu.UUID] {
			continue
		}
		situation, err := c.mig.Situation(ctx, gpu, profile.MIG, held)
		if err != nil {
			return then, after, fmt.Errorf("GPU %d: %w", gpu.Index, err)
		}
		ids = append(ids, situation.State.GPU)
		soon, later := migchange.Decide(situation), migchange.Decide(situation.Unused())
		resets := later.State == nodereport.LayoutResetRequired ||
			later.State == nodereport.LayoutPending && later.Record == nil
		switch {
		case resets && profile.MIG.Reset && c.mayReset && !situation.State.NeedsReboot:
			f.Warnings = append(f.Warnings, fmt.Sprintf("GPU %d is reset before it has its layout", gpu.Index))
		case resets:
			f.Unfit = append(f.Unfit, fmt.Sprintf(
				"GPU %d: its MIG mode changes with a reset (mig.reset) or a reboot alone", gpu.Index))
		case later.Problem() != "":
			f.Unfit = append(f.Unfit, fmt.Sprintf("GPU %d: %s", gpu.Index, later.Problem()))
		case !later.Change.Empty():
			f.Layouts = append(f.Layouts, nodereport.ForecastLayout{
				GPU:       gpu.UUID,
				Index:     gpu.Index,
				Kept:      len(later.Change.Kept),
				Destroyed: len(later.Change.Doomed),
				Made:      later.Made(),
			})
		}
		gpusThen[i], gpusAfter[i] = soon.After(gpu), later.After(gpu)
		for _, blocked := range soon.Change.Blocked {
			inTheWay[blocked.UUID] = blocked.String()
		}
		if soon.State == nodereport.LayoutBlocked && len(soon.Change.Blocked) == 0 && later.Problem() == "" {
			inTheWay[gpu.UUID] = soon.Reason
		}
		for _, unit := range unitsOf(gpu) { // Partitions that are destroyed are in no plan.
			closed[unit.Unit] = soon.Offer != nil && !soon.Offer[unit.Unit] &&
				(soon.Record == nil || inTheWay[unit.Unit] != "")
		}
	}
	facts := decide.Facts{
		Profile:      profile,
		Reservations: c.releases.Reservations(),
		Host:         s.host,
		MayReset:     c.mayReset,
		MayEvict:     c.mayEvict,
		DRA:          c.dra.Facts(s.gpus),
	}
	if facts.DRA != nil {
		// As if DRA had no units yet: what the profile gives to DRA is left out anyway.
		facts.DRA.View = claims.View{}
		facts.DRA.Geometries = c.foreseenGeometries(ctx, s, profile, facts.DRA.Geometries)
	}
	facts.GPUs = gpusAfter
	after = decide.Decide(facts).Plan
	facts.GPUs = gpusThen
	facts.Reservations = append(facts.Reservations,
		units.Reservation{Purpose: units.MIGChange, Only: func(u units.Unit) bool { return closed[u.UUID] }})
	then = decide.Decide(facts).Plan
	otherwise, grows := map[string]bool{}, map[string]bool{}
	for _, u := range then.HeldOtherwise(held, mode) {
		otherwise[u.Unit.ID] = true
		grows[u.Unit.ID] = !slices.ContainsFunc(u.Holders, func(a sharing.Allocation) bool {
			use := sharing.Use{Resource: a.Resource, Mode: mode(a.Resource, a.Devices[0])}
			return a.Claim != "" || !use.CanBecome(sharing.Use{Resource: u.Resource, Mode: u.Unit.Mode()})
		})
	}
	then = then.Drop(func(u sharing.Unit) bool { return otherwise[u.ID] && !grows[u.ID] })
	for i, r := range then.Resources { // A unit that grows has one device until its holder ends.
		then.Resources[i].Devices = slices.DeleteFunc(slices.Clone(r.Devices), func(d sharing.Device) bool {
			return grows[d.Unit] && d.ID != sharing.NewDeviceID(d.Unit, 0)
		})
	}
	pods := podsByUnit(s.gpus, held)
	for _, gpu := range s.gpus {
		for _, unit := range unitsOf(gpu) {
			if reason := inTheWay[unit.Unit]; reason != "" || otherwise[unit.Unit] {
				unit.Pods, unit.Reason = append([]string{}, pods[unit.Unit]...), reason
				f.Busy = append(f.Busy, unit)
			}
		}
	}
	for _, warning := range slices.Concat(after.Warnings, profile.MIG.Unmatched(ids)) {
		if !slices.Contains(s.plan.Warnings, warning) {
			f.Warnings = append(f.Warnings, warning)
		}
	}
	return then, after, nil
}

// foreseenGeometries returns the known geometries. If the profile has partitions made for claims,
// it returns those of all GPUs.
func (c *forecaster) foreseenGeometries(
	ctx context.Context, s *state, profile sharing.Profile, known map[string]decide.Geometry,
) map[string]decide.Geometry {
	if known == nil || !profile.DRA.DynamicMIG {
		return known
	}
	all := maps.Clone(known)
	for _, gpu := range s.gpus {
		if _, read := all[gpu.UUID]; read || !gpu.MIGCapable {
			continue
		}
		state, err := c.partitioner.State(ctx, gpu.UUID)
		all[gpu.UUID] = decide.Geometry{State: state, Unknown: err}
	}
	return all
}

// unitsOf returns the GPU and its partitions.
func unitsOf(gpu sharing.GPU) []nodereport.BusyUnit {
	units := []nodereport.BusyUnit{{Unit: gpu.UUID, Index: strconv.Itoa(gpu.Index)}}
	for _, p := range gpu.Partitions {
		units = append(units, nodereport.BusyUnit{Unit: p.UUID, Index: gpu.PartitionIndex(p)})
	}
	return units
}

// modeFunc returns how a device shares its unit, by resource and device ID.
type modeFunc func(resource, device string) sharing.Mode

// shareIn returns a modeFunc that knows the listed devices that are shares although they have their
// unit's own ID.
func shareIn(listed []plugin.ResourceStatus) modeFunc {
	shares := map[[2]string]bool{}
	for _, r := range listed {
		for _, e := range r.Listed {
			if e.ID == e.Unit && e.Mode == sharing.TimeSliced && !e.Whole {
				shares[[2]string{r.Name, e.ID}] = true
			}
		}
	}
	return func(resource, device string) sharing.Mode {
		if shares[[2]string{resource, device}] {
			return sharing.TimeSliced
		}
		return sharing.ModeOf(device)
	}
}

func byID(_, device string) sharing.Mode { return sharing.ModeOf(device) }

// foreseenResources counts the plans' healthy devices; nowBy and thenBy return how they share their
// units. While the node is being changed, a unit stays offered if its use is the same before and
// then, with the lower of the two device counts. A unit that grows from exclusive to time-sliced
// keeps its device.
func foreseenResources(now, then, after sharing.Plan, nowBy, thenBy modeFunc) []nodereport.ForecastResource {
	type offer struct {
		unit string
		use  sharing.Use
	}
	count := func(plan sharing.Plan, mode modeFunc) (offers map[offer]int) {
		offers = map[offer]int{}
		for _, r := range plan.Resources {
			for _, d := range r.Devices {
				if d.Healthy {
					offers[offer{d.Unit, sharing.Use{Resource: r.Name, Mode: mode(r.Name, d.ID)}}]++
				}
			}
		}
		return offers
	}
	offered := count(now, nowBy)
	byName := map[string]*nodereport.ForecastResource{}
	of := func(name string) *nodereport.ForecastResource {
		if byName[name] == nil {
			byName[name] = &nodereport.ForecastResource{Name: name}
		}
		return byName[name]
	}
	for o, devices := range offered {
		of(o.use.Resource).Before += devices
	}
	for o, devices := range count(then, thenBy) {
		stay := offered[o]
		if alone := (sharing.Use{Resource: o.use.Resource, Mode: sharing.Exclusive}); alone.CanBecome(o.use) {
			stay += offered[offer{o.unit, alone}]
		}
		of(o.use.Resource).Then += devices
		of(o.use.Resource).Lowest += min(devices, stay)
	}
	for o, devices := range count(after, thenBy) {
		of(o.use.Resource).After += devices
	}
	list := []nodereport.ForecastResource{}
	for _, r := range byName {
		list = append(list, *r)
	}
	slices.SortFunc(list, func(a, b nodereport.ForecastResource) int { return cmp.Compare(a.Name, b.Name) })
	return list
}
