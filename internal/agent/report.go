package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/mpsshare"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Reporter reports to Kubernetes what happens on this node.
type Reporter interface {
	// Report is called from one goroutine, first when this program serves the node and then
	// whenever the report differs from the last one. It must not wait: a report replaces one that
	// is still to be written. The report is not changed afterwards.
	Report(report nodereport.Report)
	// Run writes reports until ctx ends, and then returns without waiting for the API server. It
	// still runs while devices are withdrawn at the end.
	Run(ctx context.Context) error
}

// reports tracks how far the profile has been applied, and reports every change.
type reports struct {
	*current
	// to is nil if there is no Reporter.
	to       Reporter
	woken    <-chan struct{}
	plugin   *plugin.Manager
	mig      *migchange.Reconciler
	releases *release.Manager
	mps      *mpsshare.Manager
	health   Health
	guard    *memoryguard.Guard
	// unserved returns why HTTP is not served.
	unserved func() []error
	// switches records how long each change of the profile took until the scheduler knew of it.
	switches plugin.Observer
}

func newReports(a *agent) *reports {
	return &reports{
		current:  &a.current,
		to:       a.Reporter,
		woken:    a.reportWake,
		plugin:   a.Plugin,
		mig:      a.mig,
		releases: a.releases,
		mps:      a.mps,
		health:   a.Health,
		guard:    a.guard,
		unserved: a.web.Unserved,
		switches: a.view.switches,
	}
}

// run checks whenever the loop has decided or what is served has changed, until ctx ends.
func (r *reports) run(ctx context.Context) error {
	var last *nodereport.Report
	var measured *profileChange
	changed := r.plugin.Subscribe()
	for {
		// Load the state first: if what is served belongs to a later state, this runs again.
		s := r.state.Load()
		status := r.plugin.Status()
		p := *r.progress.Load()
		if !r.draining.Load() { // Devices that leave then are not on their way to a profile.
			p = p.next(s, status, pendingLayouts(r.mig.Status(), s.profile), time.Now())
			r.progress.Store(&p)
		}
		if slices.ContainsFunc(p.layouts,
			func(l nodereport.GPULayout) bool { return l.State == nodereport.LayoutResetRequired }) {
			r.releases.Wake()
		}
		measured = r.measureSwitch(measured, s, p, status, time.Now())
		// A program that stands by leaves reporting to the serving program.
		if r.to != nil && r.serving.Load() {
			if report := r.report(s, p, status); last == nil || !reflect.DeepEqual(*last, report) {
				last = &report
				r.to.Report(report)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			r.mig.WakeIfWaiting()
			r.mps.Wake()
		case <-r.woken:
		}
	}
}

func (r *reports) report(s *state, p profileProgress, status plugin.Status) nodereport.Report {
	report := nodereport.Report{
		State:       p.state,
		Wanted:      profileRef(s.wanted),
		Applied:     p.applied,
		Gone:        p.gone,
		Features:    s.features,
		Layouts:     p.layouts,
		NoLayout:    s.profile != nil && !wantsLayout(s.profile),
		Waits:       p.waits,
		Units:       r.health.Health().Units,
		Renumbering: sharing.Renumbering(s.gpus),
		OverLimit:   r.guard.OverLimits(),
		Hit:         map[string][]string{},
	}
	ofAnyGPU := func(a sharing.Allocation) bool { return a.AnyGPU }
	pods := podsByUnit(s.gpus, slices.DeleteFunc(slices.Clone(status.Holders), ofAnyGPU))
	for _, u := range report.Units {
		if u.State == sharing.Suspect || u.State == sharing.Unhealthy {
			report.Hit[u.Unit] = pods[u.Unit]
		}
	}
	if p.state == nodereport.ProfileRejected {
		report.Problem = firstProblem(s.rejected)
		report.LayoutRefused = errors.Is(s.rejected, configs.ErrMIGLayout)
	}
	report.LayoutsLeft = s.profile != nil && s.profile.Profile.MIG.LeftTo != ""
	report.Ready, report.Reason, report.Message = readiness(s, p, status, r.draining.Load())
	if s.pause.by.Any() && report.Reason == s.pause.by.Reason() {
		report.Message += stillUsed(s.pause.by, r.releases.List(), status.Holders)
	}
	for _, err := range r.unserved() {
		report.Message += "; not served: " + err.Error()
	}
	return report
}

// pendingLayouts returns the layouts as reported: a GPU whose layout differs from the profile's is
// pending even before its change has been decided.
func pendingLayouts(gpus []nodereport.GPULayout, profile *configs.SelectedProfile) []nodereport.GPULayout {
	if !wantsLayout(profile) {
		return gpus
	}
	gpus = slices.Clone(gpus)
	for i := range gpus {
		if wanted := profile.Profile.MIG.Name; gpus[i].Wanted != wanted {
			gpus[i].Wanted = wanted
			gpus[i].State = nodereport.LayoutPending
			gpus[i].Reason = ""
		}
	}
	return gpus
}

func wantsLayout(profile *configs.SelectedProfile) bool {
	return profile != nil && profile.Profile.MIG.Manage && profile.Profile.MIG.Name != ""
}

// readiness returns, as a condition of the Node, whether pods can get what the profile in force
// offers. Another profile that is rejected or not yet applied does not change that.
func readiness(
	s *state,
	p profileProgress,
	status plugin.Status,
	draining bool,
) (ready nodereport.ConditionStatus, reason, message string) {
	switch {
	case draining:
		return nodereport.ConditionFalse, "Draining", "all devices are being withdrawn"
	case s.pause.by.Any():
		return nodereport.ConditionFalse, s.pause.by.Reason(), s.pause.by.Text()
	case s.profile == nil && errors.Is(s.rejected, configs.ErrPending):
		return nodereport.ConditionUnknown, "Starting", "the profile is " + s.rejected.Error()
	case s.profile == nil && s.rejected != nil:
		return nodereport.ConditionFalse, "NoProfile", "no profile is in force: " + firstProblem(s.rejected)
	case s.profile == nil:
		return nodereport.ConditionUnknown, "Starting", "the profile is not known yet"
	case !s.planned && s.unread != nil && !errors.Is(s.unread, sharing.ErrNotRead):
		return nodereport.ConditionFalse, "GPUsNotRead", "the GPUs cannot be read: " + s.unread.Error()
	case !s.planned:
		return nodereport.ConditionUnknown, "Starting", "the GPUs have not been read yet"
	case p.applied == (nodereport.ProfileRef{}) && !status.Served:
		return nodereport.ConditionUnknown, "Starting", "the plan is not served yet"
	}
	offer := offerText(status)
	if s.profile.Choice.Rules != "" {
		offer = profileRef(*s.profile).Chosen() + ": " + offer
	}
	if waiting := nodereport.Waiting(p.layouts, p.waits); len(waiting) > 0 {
		offer += "; waiting: " + strings.Join(waiting, "; ")
	} else if !status.KubeletSeen && (p.state == nodereport.ProfilePending || p.state == nodereport.ProfileSwitching) {
		offer += "; what the kubelet holds and has applied cannot be read"
	}
	for _, right := range lackingRights(s.plan.Warnings, p.layouts) {
		offer += "; " + right
	}
	withheld := countObstacles(s.host.Obstacles)
	for _, because := range slices.Sorted(maps.Keys(withheld)) {
		offer += fmt.Sprintf("; cannot be granted now: %d: %s", withheld[because], because)
	}
	if left := s.profile.Profile.MIG.LeftTo; left != "" {
		offer += "; " + left
	}
	deaf := unregistered(status)
	switch {
	case len(deaf) > 0:
		return nodereport.ConditionFalse, "NotRegistered", "the kubelet does not listen to " + strings.Join(deaf, ", ")
	case s.unlisted != "":
		return nodereport.ConditionFalse, "GPUsNotListed", s.unlisted + "; serving " + offer
	case p.state == nodereport.ProfileRejected:
		return nodereport.ConditionTrue, "ProfileRejected",
			"the wanted profile is refused: " + firstProblem(s.rejected) + "; an earlier one serves " + offer
	case p.state == nodereport.ProfilePending:
		return nodereport.ConditionTrue, "ProfilePending", "the kubelet is being told of the profile: " + offer
	case p.state == nodereport.ProfileSwitching:
		return nodereport.ConditionTrue, "Switching", offer
	default:
		return nodereport.ConditionTrue, "Serving", offer
	}
}

// maxNamed limits how many users of GPUs a condition names.
const maxNamed = 10

// stillUsed describes what keeps GPUs from being released in a pause, and the resources of pods
// that the GPU Operator does not evict before it replaces the driver; empty for none.
func stillUsed(by release.Pause, releases []release.Release, holders []sharing.Allocation) string {
	var users, others []string
	for _, r := range releases {
		for _, user := range r.Waits {
			if r.State == release.Waiting && user != release.Withdrawing && !slices.Contains(users, user) {
				users = append(users, user)
			}
		}
	}
	if len(users) == 0 {
		return ""
	}
	if more := len(users) - maxNamed; more > 0 {
		users = append(users[:maxNamed:maxNamed], fmt.Sprintf("%d more", more))
	}
	text := "; still used by " + strings.Join(users, ", ")
	for _, a := range holders {
		if a.OfGPU() && !sharing.OperatorEvicts(a.Resource) && !slices.Contains(others, a.Resource) {
			others = append(others, a.Resource)
		}
	}
	if slices.Sort(others); len(others) > 0 && by.ForDriverUpgrade() {
		text += "; the GPU Operator does not evict the pods with " + strings.Join(others, ", ") + ": delete them"
	}
	return text
}

// lackingRights returns the rights that the profile in force needs and this program lacks, once
// each, for the Node's condition. Each names the chart's value that grants it.
func lackingRights(warnings []string, layouts []nodereport.GPULayout) (texts []string) {
	for _, gpu := range layouts {
		if gpu.State == nodereport.LayoutFailed {
			warnings = append(slices.Clip(warnings), gpu.Reason)
		}
	}
	for _, right := range [][2]string{
		{"partitions cannot all be read: ", sharing.NoMIGRight},
		{"MIG layout not reached: ", migchange.NotPermitted},
		{"settings of GPUs are not made: that requires ", gpusettings.Right},
		{"", decide.MPSUnanswered},
		{"", decide.NoDRA},
		{"GPUs that wait for it are not reset: ", decide.MayNotReset},
		{"", memoryguard.Unwatched},
		{"memory: ", nodereport.ErrMayNotEvict.Error()},
	} {
		if slices.ContainsFunc(warnings, func(w string) bool { return strings.Contains(w, right[1]) }) {
			texts = append(texts, right[0]+right[1])
		}
	}
	return texts
}

// offerText describes in a line what is listed for the kubelet: "nvidia.com/gpu (40 devices, 35
// healthy)". It does not count devices that no pod holds and that are about to leave.
func offerText(status plugin.Status) string {
	var texts []string
	for _, r := range status.Resources {
		devices := 0
		for _, e := range r.Listed {
			if e.Phase != plugin.Removing {
				devices++
			}
		}
		if devices > 0 || !r.Dropped {
			texts = append(texts, fmt.Sprintf("%s (%d devices, %d healthy)", r.Name, devices, r.Healthy))
		}
	}
	return cmp.Or(strings.Join(texts, ", "), "no resource")
}

// profileProgress is how far the wanted profile has been applied. It is immutable.
type profileProgress struct {
	state nodereport.ProfileState
	since time.Time
	// applied is the profile whose lists the kubelet has; zero before the first.
	applied nodereport.ProfileRef
	// appliedAt is since when it has them.
	appliedAt time.Time
	// advertised are the resources that are served, gone the resources that were, by name.
	advertised []string
	gone       []nodereport.GoneResource
	// layouts are the layouts of GPUs that Virgate partitions, waits the units that wait for pods.
	layouts []nodereport.GPULayout
	waits   []nodereport.Wait
}

// next returns the progress after p, for the loop's decision s, the plugin manager's status and
// these MIG layouts. If a stream ends, an applied profile stays applied, because only the kubelet
// is away.
func (p profileProgress) next(
	s *state,
	status plugin.Status,
	layouts []nodereport.GPULayout,
	now time.Time,
) profileProgress {
	waits, switching := waitsOf(s.gpus, status)
	switching = switching || len(nodereport.Waiting(layouts, nil)) > 0
	p.layouts, p.waits = layouts, waits
	if s.planned && s.profile != nil {
		switch ref := profileRef(*s.profile); {
		case p.applied.SameProfile(ref): // Its reason may have changed.
			p.applied = ref
		case !switching && listsApplied(status):
			p.applied, p.appliedAt = ref, now
		}
	}
	next := nodereport.ProfilePending
	switch {
	case errors.Is(s.rejected, configs.ErrPending):
	case s.rejected != nil:
		next = nodereport.ProfileRejected
	case status.Served && switching:
		next = nodereport.ProfileSwitching
	case s.profile != nil && p.applied == profileRef(*s.profile):
		next = nodereport.ProfileApplied
	}
	if next != p.state {
		p.state, p.since = next, now
	}
	return p.trackResources(status, now)
}

// waitsOf returns the units that wait for their holders. switching is true if any unit is not yet
// offered as planned, waiting or not. Units that the node no longer has do not count.
func waitsOf(gpus []sharing.GPU, status plugin.Status) (waits []nodereport.Wait, switching bool) {
	units := map[string]nodereport.Wait{} // Units without a holder have no resource.
	for _, r := range status.Resources {
		for _, e := range r.Listed {
			if (!e.Switching || e.Unused) && !e.Whole {
				continue
			}
			w := units[e.Unit]
			held := e.Phase == plugin.HeldSurplus ||
				e.Whole && slices.ContainsFunc(status.Holders, func(a sharing.Allocation) bool {
					return a.Resource == r.Name && slices.Contains(a.Devices, e.ID)
				})
			if held && (w.Resource == "" || e.Since.Before(w.Since)) {
				w.Resource, w.Since = r.Name, e.Since
			}
			units[e.Unit] = w
		}
	}
	if len(units) == 0 {
		return nil, false
	}
	byClaim := func(a sharing.Allocation) bool { return a.Claim != "" } // No list has those devices.
	pods := podsByUnit(gpus, slices.DeleteFunc(slices.Clone(status.Holders), byClaim))
	add := func(gpu, unit, index string) {
		w, known := units[unit]
		switching = switching || known
		if w.Resource != "" {
			w.GPU = gpu
			w.Unit = unit
			w.Index = index
			w.Pods = append([]string{}, pods[unit]...)
			waits = append(waits, w)
		}
	}
	for _, g := range gpus {
		if g.DriverIndex == sharing.NotListed {
			continue
		}
		add(g.UUID, g.UUID, strconv.Itoa(g.Index))
		for _, p := range g.Partitions {
			add(g.UUID, p.UUID, g.PartitionIndex(p))
		}
	}
	return waits, switching
}

// podsByUnit returns the pods that hold each unit or a partition of it, as far as the kubelet names
// them.
func podsByUnit(gpus []sharing.GPU, held []sharing.Allocation) map[string][]string {
	gpuOf, pods := sharing.GPUByUnit(gpus), map[string][]string{}
	for _, unit := range sharing.Usage(nil, held) {
		for _, h := range unit.Holders { // Sorted by pod.
			pod := h.Namespace + "/" + h.Pod
			if claim := (status.Holder{Claim: h.Claim, AnyGPU: h.AnyGPU}).ByClaim(); claim != "" {
				pod += " (" + claim + ")"
			}
			for _, id := range []string{unit.Unit.ID, gpuOf[unit.Unit.ID]} {
				if h.Namespace != "" && !slices.Contains(pods[id], pod) {
					pods[id] = append(pods[id], pod)
				}
			}
		}
	}
	return pods
}

func (p profileProgress) trackResources(status plugin.Status, now time.Time) profileProgress {
	var advertised []string
	for _, r := range status.Resources {
		advertised = append(advertised, r.Name)
	}
	gone := slices.Clone(p.gone)
	for _, name := range p.advertised {
		if !slices.Contains(advertised, name) {
			gone = append(gone, nodereport.GoneResource{Name: name, Since: now})
		}
	}
	gone = slices.DeleteFunc(gone, func(g nodereport.GoneResource) bool { return slices.Contains(advertised, g.Name) })
	slices.SortFunc(gone, func(a, b nodereport.GoneResource) int { return strings.Compare(a.Name, b.Name) })
	p.advertised, p.gone = advertised, gone
	return p
}

// listsApplied reports whether the kubelet has applied the lists of the last plan.
func listsApplied(status plugin.Status) bool {
	return status.Served && !slices.ContainsFunc(status.Resources, func(r plugin.ResourceStatus) bool {
		return r.Streams != 1 || !r.Applied
	})
}

func profileRef(s configs.SelectedProfile) nodereport.ProfileRef {
	return nodereport.ProfileRef{
		Name:       s.Name,
		Source:     s.Source,
		Generation: s.Generation,
		By:         s.Choice.By,
		Rule:       s.Choice.Rule,
		Rules:      s.Choice.Rules,
	}
}

func (p profileProgress) status(s *state) status.Profile {
	status := status.Profile{
		State:  p.state,
		Since:  p.since,
		Wanted: profileRef(s.wanted),
	}
	if !s.wanted.Delayed.IsZero() {
		status.Delayed = new(s.wanted.Delayed)
	}
	if p.applied != (nodereport.ProfileRef{}) {
		status.Applied = new(p.applied)
	}
	if s.rejected != nil {
		status.Problem, status.Error = firstProblem(s.rejected), s.rejected.Error()
	}
	return status
}

// firstProblem returns the error's first problem, with its place. A missing key comes last: another
// problem is mostly that key, misspelt.
func firstProblem(err error) string {
	if problems := configs.Problems(nil); errors.As(err, &problems) && len(problems) > 0 {
		first := slices.IndexFunc(problems, func(p configs.Problem) bool { return p.Message != configs.Required })
		return problems[max(first, 0)].Error()
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return first
}
