package e2e

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
)

// lag is how long after its cause a change may show: Virgate asks the kubelet within
// a second who holds what, the kubelet writes the node's status each second, and the
// machine may be busy: with 60 processes waiting for two cores, 3.8 s were seen.
const lag = 6 * time.Second

// judge holds all that the diary has of a storm against what may be. The kubelet has
// less of a resource because of a switch, or of pods that ended and held what the
// profile wants no more. A pod is refused because it was bound when the node's
// status said more than the kubelet had, and not for longer than the lag.
func (s *storm) judge(t *testing.T) {
	t.Helper()
	s.diary.mu.Lock()
	defer s.diary.mu.Unlock()
	if len(s.diary.wrong) > 20 {
		t.Errorf("of %d complaints the first:", len(s.diary.wrong))
	}
	for _, wrong := range s.diary.wrong[:min(len(s.diary.wrong), 20)] {
		t.Error(wrong)
	}
	for _, each := range s.falls() {
		if each.cause == "" {
			t.Errorf("%s fell from %d to %d at %s for no reason; switches before: %s", each.resource, each.from, each.to, each.at.Format(clock), s.lately(each.at))
		}
	}
	ran, refused := 0, 0
	var worst time.Duration
	for _, name := range slices.Sorted(maps.Keys(s.diary.lives)) {
		l := s.diary.lives[name]
		if !l.ran.IsZero() {
			ran++
		}
		if l.refused.IsZero() {
			continue
		}
		refused++
		since, why := s.overtaken(l)
		if since > lag || why == "" {
			t.Errorf("pod %s, bound %s and refused %s: %s; switches before: %s",
				name, l.bound.Format(clock), l.refused.Format(clock), l.refusal, s.lately(l.refused))
			continue
		}
		worst = max(worst, since)
		t.Logf("pod %s was overtaken: %s", name, why)
	}
	report := s.c.report
	report.note("storm: pods made, ran, refused because a shrink overtook them", fmt.Sprintf("%d, %d, %d", len(s.diary.lives), ran, refused))
	report.note("storm: pods that ran at once, at most", fmt.Sprint(s.most))
	report.note("storm: times the kubelet had less of a resource, all for a reason", fmt.Sprint(len(s.falls())))
	report.note("storm: worst time from a shrink to a pod's refusal", worst.Round(time.Millisecond).String())
	s.reportSwitches()
}

// overtaken says how long before the pod's refusal the kubelet had less of its
// resource than the node's status said when the pod was bound; why is empty if it
// had not.
func (s *storm) overtaken(l *life) (since time.Duration, why string) {
	// The scheduler chose shortly before, by what it knew then.
	said := max(lastBefore(s.diary.statuses, l.bound).allocatable[l.resource], lastBefore(s.diary.statuses, l.bound.Add(-time.Second)).allocatable[l.resource])
	for _, truth := range slices.Backward(s.diary.truths) {
		has := truth.allocatable[l.resource]
		switch {
		case truth.at.After(l.refused.Add(time.Second)), truth.at.After(l.bound) && has >= said:
			continue // The first look after the refusal may be the first to see why, and its news may come late.
		case has >= said:
			return since, why
		}
		since, why = max(0, l.refused.Sub(truth.at)), fmt.Sprintf("bound %s when %d of %s were said to be, refused %s, when from %s on there were %d",
			l.bound.Format(clock), said, l.resource, l.refused.Format(clock), truth.at.Format(clock), has)
	}
	return since, why
}

const clock = "15:04:05.000"

// fall is that the kubelet has less of a resource than before.
type fall struct {
	at       time.Time
	resource string
	from, to int64
	cause    string // Empty for none that is allowed.
}

func (s *storm) falls() []fall {
	var all []fall
	for i := 1; i < len(s.diary.truths); i++ {
		before, now := s.diary.truths[i-1].allocatable, s.diary.truths[i]
		for resource, from := range before {
			if to := now.allocatable[resource]; to < from {
				all = append(all, fall{now.at, resource, from, to, s.cause(now.at, resource, from-to)})
			}
		}
	}
	return all
}

// cause is why so many of a resource may go at that time.
func (s *storm) cause(at time.Time, resource string, count int64) string {
	for _, each := range slices.Backward(s.switches) {
		since := at.Sub(each.at)
		if _, takes := change(each.from, each.to, resource); takes && since > 0 && since < lag {
			return fmt.Sprintf("%s after %s", since.Round(time.Millisecond), each.name)
		}
	}
	ended := int64(0) // Before or after: of fifty that end together the API server hears late.
	for _, l := range s.diary.lives {
		if since := at.Sub(l.ended); l.resource == resource && !l.ran.IsZero() && !l.ended.IsZero() && since.Abs() < lag {
			ended++
		}
	}
	if ended >= count {
		return fmt.Sprintf("when %d pods with it had ended", ended)
	}
	return ""
}

// lately are the switches that could matter at that time.
func (s *storm) lately(at time.Time) string {
	var names []string
	for _, each := range s.switches {
		if since := at.Sub(each.at); since > 0 && since < 3*lag {
			names = append(names, fmt.Sprintf("%s at %s", each.name, each.at.Format(clock)))
		}
	}
	return fmt.Sprintf("%q", names)
}

// reportSwitches notes how long it took from a switch to the first status of the
// node that shows it: less of what it takes or more of what it gives.
func (s *storm) reportSwitches() {
	var times []time.Duration
	for i, each := range s.switches {
		end := time.Now()
		if i+1 < len(s.switches) {
			end = s.switches[i+1].at
		}
		if took, ok := s.shown(each, end); ok {
			times = append(times, took)
		}
	}
	slices.Sort(times)
	s.c.report.note("storm: switches, seen in allocatable before the next", fmt.Sprintf("%d, %d", len(s.switches), len(times)))
	if len(times) > 0 {
		s.c.report.note("storm: switch to allocatable, median and worst", fmt.Sprintf("%s, %s",
			times[len(times)/2].Round(time.Millisecond), times[len(times)-1].Round(time.Millisecond)))
	}
}

func (s *storm) shown(by switching, end time.Time) (took time.Duration, ok bool) {
	for i := 1; i < len(s.diary.statuses); i++ {
		now := s.diary.statuses[i]
		if now.at.Before(by.at) || now.at.After(end) {
			continue
		}
		for _, resource := range []string{"nvidia.com/gpu", "nvidia.com/gpu.shared"} {
			gives, takes := change(by.from, by.to, resource)
			before, after := s.diary.statuses[i-1].allocatable[resource], now.allocatable[resource]
			if gives && after > before || takes && after < before {
				return now.at.Sub(by.at), true
			}
		}
	}
	return 0, false
}
