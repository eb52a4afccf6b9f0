package agent

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Reporter tells Kubernetes what goes on at this node.
type Reporter interface {
	// Report is called from one goroutine, first when this program serves the
	// node and then whenever the report differs from the last one. It must not
	// wait; a report that comes while the one before is still being told replaces
	// it. The report is not changed afterwards.
	Report(report sharing.NodeReport)
	// Run tells until ctx ends, and then returns without waiting for the API. It
	// goes on while devices are withdrawn at the end.
	Run(ctx context.Context) error
}

// tell keeps account of the progress, and reports what is new, until ctx ends.
func (a *agent) tell(ctx context.Context) error {
	var last *sharing.NodeReport
	for {
		// The state first: what is served may belong to a later one, and is then
		// looked at again.
		s := a.state.Load()
		status := a.Plugin.Status()
		p := a.progress.Load().after(s, status, time.Now())
		a.progress.Store(&p)
		// A program that stands by leaves telling to the one that serves.
		if a.Reporter != nil && a.serving.Load() {
			if report := a.nodeReport(s, p, status); last == nil || !reflect.DeepEqual(*last, report) {
				last = &report
				a.Reporter.Report(report)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-a.Plugin.Changed():
		case <-a.decided:
		}
	}
}

// tellAgain makes tell look again. It does not wait.
func (a *agent) tellAgain() {
	select {
	case a.decided <- struct{}{}:
	default:
	}
}

// nodeReport is what Kubernetes should say.
func (a *agent) nodeReport(s *state, p progress, status plugin.Status) sharing.NodeReport {
	report := sharing.NodeReport{State: p.state, Wanted: refOf(s.wanted), Applied: p.applied, Gone: p.gone, Layouts: onTheWay(a.layouts(), s.profile)}
	if p.state == sharing.ProfileRejected {
		report.Problem = firstProblem(s.rejected)
		report.LayoutRefused = errors.Is(s.rejected, configs.ErrLayout)
	}
	if a.Health != nil {
		report.Units = a.Health.Health().Units
	}
	report.Ready, report.Reason, report.Message = readiness(s, p, status, a.draining.Load())
	return report
}

// onTheWay are the boards as they are reported: one that has another layout than
// the profile wants is pending, also when nobody has come to it yet.
func onTheWay(boards []sharing.BoardLayout, profile *configs.Selected) []sharing.BoardLayout {
	if profile == nil || !profile.Profile.MIG.Manage || profile.Profile.MIG.Name == "" {
		return boards
	}
	boards = slices.Clone(boards)
	for i := range boards {
		if wanted := profile.Profile.MIG.Name; boards[i].Wanted != wanted {
			boards[i].Wanted, boards[i].State, boards[i].Reason = wanted, sharing.LayoutPending, ""
		}
	}
	return boards
}

// readiness is whether pods can be given what the profile in force offers, as a
// condition of the Node. A profile that is rejected or on its way does not
// change that while an earlier one serves.
func readiness(s *state, p progress, status plugin.Status, draining bool) (ready sharing.ConditionStatus, reason, message string) {
	switch {
	case draining:
		return sharing.ConditionFalse, "Draining", "all devices are being withdrawn"
	case s.profile == nil && errors.Is(s.rejected, configs.ErrPending):
		return sharing.ConditionUnknown, "Starting", "the profile is " + s.rejected.Error()
	case s.profile == nil && s.rejected != nil:
		return sharing.ConditionFalse, "NoProfile", "no profile is in force: " + firstProblem(s.rejected)
	case s.profile == nil:
		return sharing.ConditionUnknown, "Starting", "the profile is not known yet"
	case !s.planned && s.unread != nil:
		return sharing.ConditionFalse, "GPUsNotRead", "the GPUs cannot be read: " + s.unread.Error()
	case !s.planned:
		return sharing.ConditionUnknown, "Starting", "the GPUs have not been read yet"
	case p.applied == (sharing.ProfileRef{}) && !status.Served:
		return sharing.ConditionUnknown, "Starting", "the plan is not served yet"
	}
	var deaf []string
	for _, r := range status.Resources {
		if r.Streams != 1 {
			deaf = append(deaf, r.Name)
		}
	}
	switch {
	case len(deaf) > 0:
		return sharing.ConditionFalse, "NotRegistered", "the kubelet does not listen to " + strings.Join(deaf, ", ")
	case p.state == sharing.ProfileRejected:
		return sharing.ConditionTrue, "ProfileRejected", "an earlier profile serves " + offerText(s.plan) + "; the wanted one is refused: " + firstProblem(s.rejected)
	case p.state == sharing.ProfilePending:
		return sharing.ConditionTrue, "ProfilePending", "the kubelet is being told of " + offerText(s.plan)
	default:
		return sharing.ConditionTrue, "Serving", offerText(s.plan)
	}
}

// offerText is a plan in a line: "nvidia.com/gpu (40 devices, 35 healthy)".
func offerText(plan sharing.Plan) string {
	if len(plan.Resources) == 0 {
		return "no resource"
	}
	texts := make([]string, len(plan.Resources))
	for i, r := range plan.Resources {
		texts[i] = fmt.Sprintf("%s (%d devices, %d healthy)", r.Name, len(r.Devices), r.Healthy())
	}
	return strings.Join(texts, ", ")
}
