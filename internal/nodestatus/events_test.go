package nodestatus

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

func gpu(state sharing.HealthState, reason string) sharing.UnitHealth {
	return sharing.UnitHealth{Unit: "GPU-a", GPU: "GPU-a", Index: "0", State: state, Reason: reason, Explanation: "why"}
}

func TestNotices(t *testing.T) {
	with := func(units ...sharing.UnitHealth) nodereport.Report {
		report := applied("g1")
		report.Units = units
		return report
	}
	rejected := func(problem string) nodereport.Report {
		report := applied("g1")
		report.State, report.Problem, report.Wanted = nodereport.ProfileRejected, problem, nodereport.ProfileRef{Source: "/p.yaml"}
		return report
	}
	pending := applied("g1")
	pending.State, pending.Wanted = nodereport.ProfilePending, ref("g2")
	nothing := nodereport.Report{State: nodereport.ProfileRejected, Wanted: ref(""), Problem: "p.yaml:1: x: unknown key"}
	before := func(report nodereport.Report) *nodereport.Report { return &report }
	partition := sharing.UnitHealth{Unit: "MIG-b", GPU: "GPU-a", Index: "0:1", State: sharing.Suspect, Reason: "XID 31", Explanation: "why"}
	hit := with(gpu(sharing.Suspect, "XID 31"))
	hit.Hit = map[string][]string{"GPU-a": {"n/p", "n/q"}}
	warmer := with(gpu(sharing.Suspect, "XID 31"))
	warmer.Units[0].Explanation = "it has 99 °C"
	renumbered := applied("g1")
	renumbered.Renumbering = "GPU 1 is its 0"
	for _, test := range []struct {
		name string
		last *nodereport.Report
		next nodereport.Report
		want []string
	}{
		{"first", nil, with(gpu(sharing.Healthy, "")), []string{"Normal ProfileApplied profile a100 of ConfigMap gpu/profiles is in force, generation g1"}},
		{"first, with a fault", nil, with(gpu(sharing.Unhealthy, "lost")), []string{
			"Normal ProfileApplied profile a100 of ConfigMap gpu/profiles is in force, generation g1", "Warning GPUUnhealthy GPU 0 (GPU-a) is unhealthy: lost (why); held by no pod that is known",
		}},
		{"first, refused", nil, nothing, []string{"Warning ProfileRejected profile a100 of ConfigMap gpu/profiles is refused, none is in force: p.yaml:1: x: unknown key"}},
		{"no news", before(with(gpu(sharing.Suspect, "XID 31"))), with(gpu(sharing.Suspect, "XID 31")), nil},
		{"pending is none", before(applied("g1")), pending, nil},
		{"applied later", before(pending), applied("g2"), []string{"Normal ProfileApplied profile a100 of ConfigMap gpu/profiles is in force, generation g2"}},
		{"refused", before(applied("g1")), rejected("p: a"), []string{"Warning ProfileRejected profile of /p.yaml is refused, generation g1 stays in force: p: a"}},
		{"refused for another reason", before(rejected("p: a")), rejected("p: b"), []string{"Warning ProfileRejected profile of /p.yaml is refused, generation g1 stays in force: p: b"}},
		{"refused for the same reason", before(rejected("p: a")), rejected("p: a"), nil},
		{"good again, the one in force", before(rejected("p: a")), applied("g1"), nil},
		{"XID", before(with(gpu(sharing.Healthy, ""))), with(gpu(sharing.Suspect, "XID 31")), []string{"Warning GPUUnhealthy GPU 0 (GPU-a) is suspect: XID 31 (why); held by no pod that is known"}},
		{"XID of a GPU that pods have", before(with(gpu(sharing.Healthy, ""))), hit, []string{"Warning GPUUnhealthy GPU 0 (GPU-a) is suspect: XID 31 (why); held by n/p, n/q"}},
		{"explained otherwise", before(with(gpu(sharing.Suspect, "XID 31"))), warmer, nil},
		{"worse", before(with(gpu(sharing.Suspect, "XID 31"))), with(gpu(sharing.Unhealthy, "XID 31")), []string{"Warning GPUUnhealthy GPU 0 (GPU-a) is unhealthy: XID 31 (why); held by no pod that is known"}},
		{"another XID", before(with(gpu(sharing.Suspect, "XID 31"))), with(gpu(sharing.Suspect, "XID 31, XID 43")), []string{"Warning GPUUnhealthy GPU 0 (GPU-a) is suspect: XID 31, XID 43 (why); held by no pod that is known"}},
		{"recovering is not recovered", before(with(gpu(sharing.Unhealthy, "lost"))), with(gpu(sharing.Recovering, "lost")), nil},
		{"recovered", before(with(gpu(sharing.Recovering, "lost"))), with(gpu(sharing.Healthy, "")), []string{"Normal GPURecovered GPU 0 (GPU-a) is healthy again, it had: lost"}},
		{"a partition", before(with()), with(partition), []string{"Warning GPUUnhealthy partition 0:1 (MIG-b) of GPU-a is suspect: XID 31 (why); held by no pod that is known"}},
		{"renumbered", before(applied("g1")), renumbered, []string{"Warning GPUsRenumbered GPU 1 is its 0"}},
		{"still renumbered", before(renumbered), renumbered, nil},
		{"no longer renumbered", before(renumbered), applied("g1"), nil},
		{"by a rule", before(pending), byRule("g2", 2, "list1"), []string{"Normal ProfileApplied profile a100 by rule 2 of ConfigMap gpu/profiles is in force, generation g2"}},
		{"the same by another list of rules", before(byRule("g2", 2, "list1")), byRule("g2", 2, "list2"), nil},
		{"the same by another rule", before(byRule("g2", 2, "list1")), byRule("g2", 3, "list2"), []string{"Normal ProfileApplied profile a100 by rule 3 of ConfigMap gpu/profiles is in force, generation g2"}},
		{"the same, before and after there are rules", before(applied("g2")), byRule("g2", 2, "list1"), []string{"Normal ProfileApplied profile a100 by rule 2 of ConfigMap gpu/profiles is in force, generation g2"}},
		{"a faulty partition is cut away", before(with(partition)), with(), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, n := range newEvents(test.last, test.next) {
				got = append(got, n.kind+" "+n.reason+" "+n.message)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCut(t *testing.T) {
	for _, text := range []string{"", "short", strings.Repeat("x", maxMessage), strings.Repeat("x", maxMessage+1), strings.Repeat("ü", maxMessage), strings.Repeat("日", maxMessage)} {
		got := truncate(text)
		if len(got) > maxMessage || !utf8.ValidString(got) {
			t.Errorf("%d bytes, valid %t", len(got), utf8.ValidString(got))
		}
		if len(text) <= maxMessage && got != text || len(text) > maxMessage && !strings.HasSuffix(got, "…") {
			t.Errorf("cut(%d bytes) is %q", len(text), got)
		}
	}
}

func FuzzCut(f *testing.F) {
	f.Add(strings.Repeat("a", 1022) + "ü…")
	f.Fuzz(func(t *testing.T, text string) {
		got := truncate(text)
		if len(got) > maxMessage || utf8.ValidString(text) && !utf8.ValidString(got) {
			t.Errorf("%q", got)
		}
	})
}

func TestLayoutNotices(t *testing.T) {
	gpu := func(wanted string, state nodereport.LayoutState, reason string) []nodereport.GPULayout {
		return []nodereport.GPULayout{{GPU: "GPU-a", Index: 3, Wanted: wanted, State: state, Reason: reason}}
	}
	applied, blocked := gpu("day", nodereport.LayoutApplied, ""), gpu("day", nodereport.LayoutBlocked, "1g.5gb is in use")
	pending := gpu("day", nodereport.LayoutPending, "devices are being withdrawn")
	for _, test := range []struct {
		name       string
		last, next []nodereport.GPULayout
		want       []string
	}{
		{"no GPU", nil, nil, nil},
		{"applied at the start", nil, applied, nil},
		{"blocked at the start", nil, blocked, []string{"Warning MIGBlocked GPU 3 (GPU-a) does not have layout day: 1g.5gb is in use"}},
		{"on the way", applied, pending, nil},
		{"there", pending, applied, []string{"Normal MIGApplied GPU 3 (GPU-a) has layout day"}},
		{"recovered", blocked, applied, []string{"Normal MIGApplied GPU 3 (GPU-a) has layout day"}},
		{"still blocked", blocked, blocked, nil},
		{"another layout, at once", applied, gpu("night", nodereport.LayoutApplied, ""), []string{"Normal MIGApplied GPU 3 (GPU-a) has layout night"}},
		{"blocked for another reason", blocked, gpu("day", nodereport.LayoutBlocked, "2g.10gb is in use"), []string{"Warning MIGBlocked GPU 3 (GPU-a) does not have layout day: 2g.10gb is in use"}},
		{"failed", pending, gpu("day", nodereport.LayoutFailed, "driver"), []string{"Warning MIGFailed GPU 3 (GPU-a) does not have layout day: driver"}},
		{"reset", pending, gpu("day", nodereport.LayoutResetRequired, "mode"), []string{"Warning MIGResetRequired GPU 3 (GPU-a) does not have layout day: mode"}},
		{"given up", blocked, nil, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, n := range newEvents(&nodereport.Report{Layouts: test.last}, nodereport.Report{Layouts: test.next}) {
				got = append(got, n.kind+" "+n.reason+" "+n.message)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWaitNotices(t *testing.T) {
	wait := func(pods ...string) nodereport.Wait {
		return nodereport.Wait{GPU: "GPU-a", Unit: "GPU-a", Index: "3", Resource: "nvidia.com/gpu", Pods: pods}
	}
	partition := nodereport.Wait{GPU: "GPU-a", Unit: "MIG-b", Index: "3:1", Resource: "old", Pods: []string{"ns/a"}}
	layout := func(state nodereport.LayoutState) []nodereport.GPULayout {
		return []nodereport.GPULayout{{GPU: "GPU-a", Index: 3, Wanted: "day", State: state, Reason: "ns/a"}}
	}
	waiting := func(waits ...nodereport.Wait) nodereport.Report { return nodereport.Report{Waits: waits} }
	blocked := waiting(wait("ns/a"))
	blocked.Layouts = layout(nodereport.LayoutBlocked)
	other := waiting(wait("ns/a"))
	other.Layouts = layout(nodereport.LayoutApplied)
	begins := func(what, by string) string {
		return "Warning SwitchWaiting " + what + " by " + by + " until they end; it is not offered as the profile wants meanwhile"
	}
	const name = "GPU 3 (GPU-a), held as nvidia.com/gpu"
	ends := []string{"Normal SwitchComplete GPU 3 (GPU-a) no longer waits for a pod"}
	for _, test := range []struct {
		name       string
		last, next nodereport.Report
		want       []string
	}{
		{"two pods", waiting(), waiting(wait("ns/a", "ns/b")), []string{begins(name, "ns/a, ns/b")}},
		{"one is gone", waiting(wait("ns/a", "ns/b")), waiting(wait("ns/b")), nil},
		{"the other too", waiting(wait("ns/b")), waiting(), ends},
		{"not known", waiting(), waiting(wait()), []string{begins(name, "a pod that the kubelet does not name")}},
		{"known later", waiting(wait()), waiting(wait("ns/a")), []string{begins(name, "ns/a")}},
		{"not known any more", waiting(wait("ns/a")), waiting(wait()), nil},
		{"a partition", waiting(wait("ns/a")), waiting(wait("ns/a"), partition), []string{begins("partition 3:1 (MIG-b), held as old", "ns/a")}},
		{"a GPU that has its layout", waiting(), other, []string{begins(name, "ns/a")}},
		{"told as a layout", nodereport.Report{Layouts: blocked.Layouts}, blocked, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, n := range newEvents(&test.last, test.next) {
				got = append(got, n.kind+" "+n.reason+" "+n.message)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func at(seconds int) time.Time { return time.Unix(1_700_000_000+int64(seconds), 0) }

func TestQueueCounts(t *testing.T) {
	q := newEventQueue(defaultTiming())
	n := warning(ReasonGPUUnhealthy, "a")
	q.add(n, at(0))
	s, _, ok := q.next(at(0))
	if !ok || s.count != 1 || s.created || s.name == "" {
		t.Fatalf("took %+v", s)
	}
	q.add(n, at(1)) // While it is being written.
	q.written(s, at(1), false)
	if _, after, ok := q.next(at(2)); ok || after != 29*time.Second {
		t.Errorf("taken %t, or after %s", ok, after)
	}
	q.add(n, at(3))
	again, _, ok := q.next(at(31))
	if !ok || again.count != 3 || !again.created || again.name != s.name || !again.first.Equal(at(0)) || !again.last.Equal(at(3)) {
		t.Errorf("took %+v", again)
	}
	q.written(again, at(31), true) // The API has forgotten it.
	anew, _, ok := q.next(at(100))
	if !ok || anew.count != 2 || anew.created || anew.name == s.name {
		t.Errorf("took %+v", anew)
	}
	q.written(anew, at(100), false)
	if s, after, ok := q.next(at(10_000)); ok || after != 0 {
		t.Errorf("took %+v, or after %s", s, after)
	}
}

// TestQueueForgetsOldCounts lets enough time pass for the API to forget the event.
func TestQueueForgetsOldCounts(t *testing.T) {
	q := newEventQueue(defaultTiming())
	n := normal(ReasonProfileApplied, "a")
	q.add(n, at(0))
	s, _, _ := q.next(at(0))
	q.written(s, at(0), false)
	q.add(n, at(3600))
	if s, _, ok := q.next(at(3600)); !ok || s.created || s.count != 1 {
		t.Errorf("took %+v", s)
	}
}

func TestQueueIsBounded(t *testing.T) {
	q := newEventQueue(defaultTiming())
	for i := range 10 * maxQueued {
		q.add(normal(ReasonProfileApplied, "%d", i), at(i))
	}
	if len(q.series) != maxQueued || q.takeDropped() != 9*maxQueued || q.takeDropped() != 0 {
		t.Errorf("%d are kept", len(q.series))
	}
	if s, _, _ := q.next(at(0)); s.message != fmt.Sprint(9*maxQueued) {
		t.Errorf("the oldest is %s", s.message)
	}
	written := 0
	now := at(0)
	for range maxQueued {
		if s, _, ok := q.next(now); ok {
			q.written(s, now, false)
			written++
		}
	}
	if _, after, ok := q.next(now); written != 25 || ok || after != 10*time.Second {
		t.Errorf("%d written at once, the next %t or after %s", written, ok, after)
	}
	// A written event is dropped before a waiting one.
	q.add(normal(ReasonProfileApplied, "more"), now)
	if q.takeDropped() != 0 || len(q.series) != maxQueued {
		t.Error("one that waits was dropped")
	}
}

func TestBackoff(t *testing.T) {
	for _, test := range []struct {
		name        string
		err         error
		failures    int
		least, most time.Duration
	}{
		{"first", errors.New("x"), 1, 500 * time.Millisecond, time.Second},
		{"third", errors.New("x"), 3, 2 * time.Second, 4 * time.Second},
		{"many", errors.New("x"), 1000, time.Minute, 2 * time.Minute},
		{"no such Node", fmt.Errorf("patch: %w", apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, "n1")), 1000, 7500 * time.Millisecond, 15 * time.Second},
		{"what was asked for, and not the same on all nodes", fmt.Errorf("patch: %w", apierrors.NewTooManyRequests("slow down", 300)), 1, 300*time.Second + 500*time.Millisecond, 601 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			unlike := map[time.Duration]bool{}
			longest := time.Duration(0)
			for range 100 {
				l := newWriteLoop(nil, nil, defaultTiming(), nil)
				var wait time.Duration
				for range test.failures {
					wait = l.pauseAfter(test.err)
				}
				if wait < test.least || wait > test.most {
					t.Fatalf("%s, want %s to %s", wait, test.least, test.most)
				}
				unlike[wait], longest = true, max(longest, wait)
			}
			if longest < (test.least+test.most)/2 {
				t.Errorf("the longest of 100 is %s: not spread from %s to %s", longest, test.least, test.most)
			}
			if test.least != test.most && len(unlike) < 10 {
				t.Errorf("only %d different waits: no jitter", len(unlike))
			}
		})
	}
}

// TestQueueDropsWhatIsWritten has an older waiting event and a newer written one: the newer one is dropped.
func TestQueueDropsWhatIsWritten(t *testing.T) {
	q := newEventQueue(defaultTiming())
	a, b := normal(ReasonProfileApplied, "a"), normal(ReasonProfileApplied, "b")
	for i, n := range []eventText{a, b} {
		q.add(n, at(2*i))
		s, _, ok := q.next(at(2 * i))
		if !ok || s.eventText != n {
			t.Fatalf("took %+v", s)
		}
		q.written(s, at(2*i), false)
		if n == a {
			q.add(a, at(1))
		}
	}
	for i := len(q.series); i <= maxQueued; i++ {
		q.add(normal(ReasonProfileApplied, "%d", i), at(3))
	}
	if q.takeDropped() != 0 || q.series[0].eventText != a || q.series[1].eventText == b {
		t.Errorf("the first are %+v and %+v", q.series[0], q.series[1])
	}
}

// TestQueueWaitsWithBlocked checks that a blocked layout is not written at once, and not forgotten if it happened
// again meanwhile.
func TestQueueWaitsWithBlocked(t *testing.T) {
	q := newEventQueue(defaultTiming())
	n := warning(ReasonMIGBlocked, "a")
	q.add(n, at(0))
	if _, after, ok := q.next(at(2)); ok || after != time.Second {
		t.Errorf("taken %t, or after %s", ok, after)
	}
	s, _, ok := q.next(at(3))
	if !ok {
		t.Fatal("not taken after 3 s")
	}
	q.add(n, at(3))
	q.forget(s)
	if again, _, ok := q.next(at(3)); !ok || again.count != 2 {
		t.Errorf("took %+v, %t", again, ok)
	} else {
		q.forget(again)
	}
	if s, after, ok := q.next(at(4)); ok || after != 0 {
		t.Errorf("took %+v, or after %s", s, after)
	}
}
