package agent

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// state is the loop's last decision. It is immutable.
type state struct {
	// profile is the last good one. planned is true if it was planned for known GPUs.
	profile *configs.SelectedProfile
	// restored is true if profile is the last run's.
	restored bool
	// wanted is what ConfigSource returned last; of a rejected profile, only name and source.
	wanted  configs.SelectedProfile
	plan    sharing.Plan
	planned bool
	gpus    []sharing.GPU
	// features are the labels that follow from gpus and profile; nil before those are known.
	features map[string]string
	// host is what was last prepared for allocate responses.
	host grant.Host
	// rejected is why the wanted profile is not in force, unread why no GPU can be read.
	rejected, unread error
	// unlisted is the result of Node.Unlisted.
	unlisted string
	pause    pause
	// change is the last change of the profile in force; nil before the first.
	change *profileChange
}

// planLoop decides whenever it is asked to, until ctx ends.
func (a *agent) planLoop(ctx context.Context) error {
	defer close(a.planEnded)
	for {
		var planned chan struct{}
		select {
		case <-ctx.Done():
			return nil
		case <-a.Reload:
		case <-a.replan:
		case planned = <-a.replanNow:
		}
		a.decide()
		if planned != nil {
			close(planned)
		}
	}
}

// decide is one round of the loop:
//
//  1. Gather. readInputs reads the GPUs, the profile and the pause. facts adds the reservations and
//     warnings of the parts, and prepares the host.
//  2. Decide. decide.Decide works on these facts only.
//  3. Act. act updates the table of claims, then DRA, then the device plugin.
//  4. Tell. The state is stored; then the parts and the reports, which read it, are woken.
//
// If the profile cannot be used, the last good one is planned for the present GPUs. If the GPUs
// cannot be read, the plan stays. Before there is a profile, or GPUs to plan for, 2 and 3 are
// skipped.
func (a *agent) decide() {
	last, now := a.state.Load(), time.Now()
	next := a.readInputs(last)
	if last.planned && !last.restored && last.profile.Generation != next.profile.Generation && a.serving.Load() {
		next.change = &profileChange{seen: now, before: healthyDevices(last.plan)}
	}
	if next.profile != nil && (next.unread == nil || last.planned) {
		a.act(last, next, decide.Decide(a.facts(last, next)))
	}
	if a.Features != nil && next.profile != nil && next.unread == nil {
		next.features = a.Features(next.gpus, next.profile.Profile)
	}
	a.state.Store(next)
	a.dra.Wake()
	a.mps.Wake()
	a.gpuSettings.Wake()
	a.mig.Wake()
	a.wakeReport()
	if next.pause.by.Any() || next.pause != last.pause {
		a.releases.Wake()
	}
}

// readInputs reads GPUs, profile and pause.
func (a *agent) readInputs(last *state) *state {
	next := *last
	var gpus []sharing.GPU
	gpus, next.unread = a.Node.Inventory()
	if next.unread == nil {
		next.gpus = gpus
	} else if last.planned && !sameError(last.unread, next.unread) {
		a.Logger.Warn("GPUs not read", "error", next.unread)
	}
	next.unlisted = a.Node.Unlisted()
	a.selectProfile(last, &next)
	next.pause = a.pauseNow()
	logPause(a.Logger, last.pause, next.pause)
	return &next
}

// selectProfile finds the profile in force: the wanted one, else this program's last good one, else
// the one of the program before it. While the choice waits for the GPUs, the one of the program
// before it comes first: its health rules judge the first scan.
func (a *agent) selectProfile(last, next *state) {
	wanted, err := a.ConfigSource.Profile()
	serving := a.serving.Load()
	if errors.Is(err, configs.ErrNoMPS) && a.nothingElse(next, wanted, serving) {
		err = nil // The rest, which needs no daemon, is offered.
	} else if errors.Is(err, configs.ErrNoMPS) {
		wanted = wanted.Refused()
	}
	// Before the GPUs were first read, nothing is planned, and it is unknown whether the profile
	// fits the node.
	known := last.planned || next.unread == nil
	inForce := last.planned && !last.restored && last.profile.Generation == wanted.Generation
	if err == nil && known && !inForce {
		err = wanted.CheckNode(next.gpus)
		if err != nil {
			wanted = wanted.Refused()
			if !last.planned { // It may date from before the GPUs were known.
				next.profile = nil
			}
		}
	}
	next.wanted, next.rejected = wanted, err
	awaits := err == nil && wanted.Choice.AwaitsGPUs && !known
	switch {
	case serving && (awaits || err != nil && next.profile == nil) && a.restoreProfile(next):
	case err == nil:
		next.profile, next.restored = &wanted, false
	}
	// Save it even if the wanted one is rejected: a program that stood by has saved none.
	if serving && known && next.profile != nil && !next.restored {
		a.LastKnownGood.Save(*next.profile)
	}
	if err != nil && !sameError(last.rejected, err) {
		switch {
		case errors.Is(err, configs.ErrPending):
			a.Logger.Info("waiting for the profile", "because", err)
		case next.profile == nil:
			a.Logger.Error("profile rejected, none is in force", "error", err)
		default:
			a.Logger.Error("profile rejected, the last good one stays in force", "error", err)
		}
	}
	if next.profile == nil || last.profile != nil && last.profile.Generation == next.profile.Generation {
		return
	}
	if err == nil && !next.restored {
		a.Logger.Info("profile in force", "profile", wanted.String(), "generation", wanted.Generation, "by",
			wanted.Choice.By)
	}
	a.SetHealthRules(next.profile.Profile)
}

// restoreProfile puts the profile of the last run in force. It returns false if there is none.
func (a *agent) restoreProfile(next *state) bool {
	kept, ok := a.LastKnownGood.Load()
	if !ok {
		return false
	}
	if next.profile == nil || !next.restored {
		a.Logger.Info("using the profile of the last run", "profile", kept.String(), "generation", kept.Generation)
	}
	next.profile, next.restored = &kept, true
	return true
}

// nothingElse reports whether no other profile than this one has been in force on the node, as
// after a first start. Refusing it would leave all GPUs unused.
func (a *agent) nothingElse(s *state, wanted configs.SelectedProfile, serving bool) bool {
	if s.profile != nil || !serving {
		return s.profile != nil && s.profile.Generation == wanted.Generation
	}
	kept, ok := a.LastKnownGood.Load()
	return !ok || kept.Generation == wanted.Generation
}

// LastKnownGood stores the profile in force for the next start. Only the loop of the program that
// serves the node calls it.
type LastKnownGood interface {
	// Load returns the profile that was in force when the last program ended; false if there was
	// none or it can no longer be used.
	Load() (configs.SelectedProfile, bool)
	// Save is called with the profile in force whenever the loop decides, except with one that Load
	// returned. It does not wait for the disk, and logs errors itself.
	Save(configs.SelectedProfile)
}

// pause is the last result of Options.Paused.
type pause struct {
	by    release.Pause
	known bool
}

func (a *agent) pauseNow() (p pause) {
	if a.Paused == nil {
		return pause{known: true}
	}
	p.by, p.known = a.Paused()
	return p
}

// logPause logs when a pause begins and ends.
func logPause(log *slog.Logger, last, next pause) {
	switch {
	case next.by.Any() && next.by != last.by:
		log.Warn("a label of the Node pauses this program", "label", next.by.Label, "value", next.by.Value)
	case last.by.Any() && !next.by.Any() && next.known:
		log.Info("no label of the Node pauses this program any more")
	}
}

// pauseWait limits how long the driver stays closed at the start while it is unknown whether there
// is a pause.
const pauseWait = 2 * time.Second

// awaitPause waits until it is known whether there is a pause, but at most pauseWait: a node must
// serve without an API server.
func (a *agent) awaitPause(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, pauseWait)
	defer cancel()
	for !a.pauseNow().known && ctx.Err() == nil {
		wake.Sleep(ctx, pauseWait/40)
	}
}

// facts returns the decision's inputs. It also prepares the host for what may be granted.
func (a *agent) facts(last, next *state) decide.Facts {
	// Read these before preparing the host, which may take 2 s: a release that ends meanwhile may
	// have given the GPU other partitions than the ones that were read.
	reservations := slices.Concat(a.mig.Reservations(), a.releases.Reservations())
	a.prepareHost(last, next)
	mps := a.mps.View()
	reservations = append(reservations, mps.Reservations()...)
	return decide.Facts{
		GPUs:         next.gpus,
		Profile:      next.profile.Profile,
		Reservations: reservations,
		Warnings:     slices.Concat(a.gpuSettings.Warnings(next.gpus), a.guard.Warnings()),
		MayReset:     a.Releases.Reset != nil,
		MayEvict:     a.Pods.Evict != nil,
		Host:         next.host,
		MPS:          mps,
		DRA:          a.dra.Facts(next.gpus),
	}
}

// prepareHost prepares the host for what the profile may grant. A program that stands by does not
// touch the host.
func (a *agent) prepareHost(last, next *state) {
	if !a.serving.Load() {
		return
	}
	grants := next.profile.Profile.Grants
	grants.Claims = a.DRA.Driver != nil
	next.host = a.Host.Prepare(grants, next.gpus)
	if reflect.DeepEqual(last.host, next.host) {
		return
	}
	a.Plugin.SetHost(next.host)
	reasons, known := countObstacles(next.host.Obstacles), countObstacles(last.host.Obstacles)
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		if reasons[reason] != known[reason] {
			a.Logger.Warn("gpus withheld", "reason", reason, "units", reasons[reason])
		}
	}
	if len(reasons) == 0 && len(known) > 0 {
		a.Logger.Info("all gpus can be granted")
	}
}

// Host provides what allocate responses refer to: CDI specs, device nodes, the driver.
type Host interface {
	// Prepare ensures that the host has what these grants and GPUs need. It returns what the host
	// has, which is not changed afterwards.
	//
	// The loop calls it before each plan is published and waits for it, up to 2 s while CDI specs
	// are being written: a device that is listed before its CDI spec exists could be allocated at
	// once, and the container would fail to start. It seldom waits: a spec is written when GPUs
	// have changed. It waits only once for a late spec, so that a hung driver delays one plan, not
	// every fault.
	Prepare(grants sharing.Grants, gpus []sharing.GPU) grant.Host
	// Watch is as in Node: it calls changed when Prepare would return something else.
	Watch(ctx context.Context, changed func()) error
}

func countObstacles(obstacles map[string]string) map[string]int {
	reasons := map[string]int{}
	for _, reason := range obstacles {
		reasons[reason]++
	}
	return reasons
}

// act passes the decision to the table of claims, which must know a unit before it is offered, then
// to DRA, then to the device plugin. An unchanged plan is not applied again.
func (a *agent) act(last, next *state, d decide.Decision) {
	if d.Units != nil {
		a.dra.SetUnits(d.Units)
	}
	if a.serving.Load() {
		a.dra.Publish(d.Offer)
	}
	next.plan = d.Plan
	if last.planned && reflect.DeepEqual(last.plan, next.plan) {
		next.plan = last.plan
		return
	}
	next.planned = true
	a.logPlan(last.plan, next.plan)
	a.Plugin.Apply(next.plan)
}

func (a *agent) logPlan(last, next sharing.Plan) {
	for _, r := range next.Resources {
		a.Logger.Info("resource planned", "resource", r.Name, "strategy", r.Strategy(), "units", len(r.Units),
			"devices", len(r.Devices), "healthy", r.HealthyDevices())
	}
	for _, warning := range next.Warnings {
		if !slices.Contains(last.Warnings, warning) {
			a.Logger.Warn("plan", "warning", warning)
		}
	}
}

func sameError(a, b error) bool {
	return a != nil && b != nil && a.Error() == b.Error()
}

// requestPlan makes the loop read its inputs again. Several requests may lead to one reading.
func (a *agent) requestPlan() { a.replan.Notify() }

// wakeReport makes the reports check again. It does not wait.
func (a *agent) wakeReport() { a.reportWake.Notify() }

// planNow returns when the loop has read its inputs after the call, or when ctx ends.
func (a *agent) planNow(ctx context.Context) {
	planned := make(chan struct{})
	select {
	case a.replanNow <- planned:
		<-planned
	case <-ctx.Done():
	}
}
