package report

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/sharing"
)

// Reasons of the Events.
const (
	// ProfileApplied says that another profile is in force.
	ProfileApplied = "ProfileApplied"
	// ProfileRejected says that the wanted one cannot be, with its first problem.
	ProfileRejected = "ProfileRejected"
	// GPUUnhealthy says that a GPU or partition must not be used, and why.
	GPUUnhealthy = "GPUUnhealthy"
	// GPURecovered says that it may be used again, and what was wrong.
	GPURecovered = "GPURecovered"
)

// notice is what an Event says. Equal notices are one Event with a count.
type notice struct{ kind, reason, message string }

func warning(reason, format string, arguments ...any) notice {
	return notice{corev1.EventTypeWarning, reason, cut(fmt.Sprintf(format, arguments...))}
}

func normal(reason, format string, arguments ...any) notice {
	return notice{corev1.EventTypeNormal, reason, cut(fmt.Sprintf(format, arguments...))}
}

// notices are what is news in next after last, which is nil for the first
// report: then everything that is not as it should be is news.
func notices(last *sharing.NodeReport, next sharing.NodeReport) []notice {
	if last == nil {
		last = &sharing.NodeReport{}
	}
	var news []notice
	if next.State == sharing.ProfileRejected && (last.State != sharing.ProfileRejected || last.Problem != next.Problem || last.Wanted != next.Wanted) {
		news = append(news, warning(ProfileRejected, "%s is refused, %s: %s", profileText(next.Wanted), inForce(next.Applied), next.Problem))
	}
	if next.Applied != last.Applied {
		news = append(news, normal(ProfileApplied, "%s is in force, generation %s", profileText(next.Applied), next.Applied.Generation))
	}
	news = append(news, healthNotices(last.Units, next.Units)...)
	return append(news, layoutNotices(last.Layouts, next.Layouts)...)
}

// healthNotices are what is news about units. A unit that is suspect and then
// unhealthy, or is so for another reason, is news each time; one that recovers
// is when it is healthy.
func healthNotices(last, next []sharing.UnitHealth) []notice {
	before := make(map[string]sharing.UnitHealth, len(last))
	for _, unit := range last {
		before[unit.Unit] = unit
	}
	var news []notice
	for _, unit := range next {
		was, known := before[unit.Unit]
		switch unit.State {
		case sharing.Suspect, sharing.Unhealthy:
			if was.State != unit.State || was.Reason != unit.Reason {
				news = append(news, warning(GPUUnhealthy, "%s is %s: %s", unitText(unit), unit.State, unit.Reason))
			}
		case sharing.Healthy:
			if known && was.State != sharing.Healthy {
				news = append(news, normal(GPURecovered, "%s is healthy again, it had: %s", unitText(unit), was.Reason))
			}
		case sharing.Recovering:
		}
	}
	return news
}

func unitText(unit sharing.UnitHealth) string {
	if unit.Unit == unit.GPU {
		return fmt.Sprintf("GPU %s (%s)", unit.Index, unit.Unit)
	}
	return fmt.Sprintf("partition %s (%s) of %s", unit.Index, unit.Unit, unit.GPU)
}

// profileText names a profile: "profile a100 of ConfigMap gpu/profiles".
func profileText(p sharing.ProfileRef) string {
	words := []string{"profile"}
	if p.Name != "" {
		words = append(words, p.Name)
	}
	if p.Source != "" {
		words = append(words, "of", p.Source)
	}
	return strings.Join(words, " ")
}

func inForce(applied sharing.ProfileRef) string {
	if applied == (sharing.ProfileRef{}) {
		return "none is in force"
	}
	return "generation " + applied.Generation + " stays in force"
}
