package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// guardTest is a node with one GPU in four shares, of which each container may use 3 GiB.
type guardTest struct {
	*watch
	now time.Time
	// uids are those of pods that differ from their names; evicted are pods by UID, in order,
	// fail the errors of Evict by UID.
	uids    map[string]string
	evicted []string
	fail    map[string]error
}

func newGuardTest(t *testing.T, evict bool) *guardTest {
	g := &guardTest{watch: newWatch(t, "t4", 4), now: time.Now(), uids: map[string]string{}, fail: map[string]error{}}
	p := profile(4)
	p.TimeSlicing[0].Guard = sharing.MemoryGuard{Bytes: 3072 * mebibyte, Grace: 30 * time.Second, Evict: evict}
	g.state.Store(&state{gpus: g.gpus, plan: sharing.NewPlan(g.gpus, p), planned: true})
	g.Pods = Pods{
		UID: func(namespace, pod string) string {
			if uid, other := g.uids[pod]; other {
				return uid
			}
			return namespace + "/" + pod
		},
		Evict: func(_ context.Context, namespace, pod, uid string) error {
			if err := g.fail[uid]; err != nil {
				return err
			}
			g.evicted = append(g.evicted, uid)
			return nil
		},
	}
	g.pod("worst", 0, 6000*mebibyte, 0)
	g.pod("bad", 0, 4000*mebibyte, 0)
	g.pod("good", 0, 3072*mebibyte, 0)
	g.process(0, 5000*mebibyte, 0, "") // Of nobody.
	g.process(0, 9000*mebibyte, 0, "ns/stranger/main")
	return g
}

// pass lets so much time pass, with a sample every five seconds, and then lets the guard act.
func (g *guardTest) pass(length time.Duration) {
	g.t.Helper()
	for end := g.now.Add(length); g.now.Before(end); {
		g.now = g.now.Add(min(5*time.Second, end.Sub(g.now)))
		g.look(g.Measure(g.t.Context()))
	}
	g.evictOne(g.t.Context(), g.now)
}

func (g *guardTest) look(measured sharing.Measurement) {
	s := g.state.Load()
	report := sharing.NewUtilizationReport(measured, s.gpus, s.plan.Resources, g.holders.held, true)
	g.guardMemory(report, s, g.holders.held, g.now, 5*time.Second)
}

// told are the pods over their limits, with what became of them.
func (g *guardTest) told() string {
	var texts []string
	for _, o := range g.guard.overLimits() {
		text := o.Pod
		if o.Evicted {
			text += " evicted"
		}
		if o.Refused != "" {
			text += " refused: " + o.Refused
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

func (g *guardTest) wants(what, told string, evicted ...string) {
	g.t.Helper()
	if diff := cmp.Diff(evicted, g.evicted); diff != "" {
		g.t.Errorf("%s: evicted (-want +got):\n%s", what, diff)
	}
	if got := g.told(); got != told {
		g.t.Errorf("%s: told %q, want %q", what, got, told)
	}
}

// end ends the pod.
func (g *guardTest) end(pod string, pid int) {
	g.t.Helper()
	g.holders.held = slices.DeleteFunc(g.holders.held, func(a sharing.Allocation) bool { return a.Pod == pod })
	if err := g.node.RemoveProcess(0, -1, pid); err != nil {
		g.t.Fatal(err)
	}
}

// TestGuardEvicts holds who is evicted, in which order, and that nobody else is: the one with
// the most memory beyond its limit, after the grace, and the next when that one has ended.
func TestGuardEvicts(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t, true)
	g.pass(30 * time.Second)
	g.wants("within the grace", "")
	g.pass(5 * time.Second)
	g.wants("after it", "bad, worst evicted", "ns/worst")
	g.pass(time.Minute)
	g.wants("while it ends", "bad, worst evicted", "ns/worst")
	g.end("worst", 102)
	g.pass(5 * time.Second)
	g.wants("when it has ended", "bad evicted", "ns/worst", "ns/bad")
	g.end("bad", 104)
	g.pass(5 * time.Minute)
	g.wants("when both have", "", "ns/worst", "ns/bad")
	g.want(g.series("memory_guard_evictions_total", "result"), "evicted:2 failed:0 refused:0")
}

// TestGuardReports holds that nobody is evicted where the profile does not say so, and what
// metrics and status say.
func TestGuardReports(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t, false)
	g.pass(time.Minute)
	g.wants("reported", "bad, worst")
	list := g.guard.overLimits()
	if want := fmt.Sprintf("container main of pod ns/bad uses 4000 MiB of %s and may use 3072 MiB, for longer than 30s", g.gpus[0].UUID); list[0].Text != want {
		t.Errorf("text %q, want %q", list[0].Text, want)
	}
	if report := g.nodeReport(g.state.Load(), *g.progress.Load(), g.Plugin.Status()); !slices.Equal(report.OverLimit, list) {
		t.Errorf("the report has %+v", report.OverLimit)
	}
	g.sampleNow()
	g.want(g.series("container_memory_limit_bytes", "pod"), "bad:3.221225472e+09 good:3.221225472e+09 worst:3.221225472e+09")
	for i := range g.gpus[:1] {
		for _, h := range g.status(t.Context()).GPUs[i].Units[0].Holders {
			if h.Use == nil || h.Use.Limit == nil || *h.Use.Limit != 3072*mebibyte {
				t.Errorf("%s: use %+v", h.Pod, h.Use)
			}
		}
	}
}

// TestGuardIsCertain holds that what is not known for a moment ends the time that counts.
func TestGuardIsCertain(t *testing.T) {
	t.Parallel()
	for name, lapse := range map[string]func(g *guardTest){
		"nobody knows whose the processes are": func(g *guardTest) {
			measured := g.Measure(g.t.Context())
			measured.Owners = nil
			g.look(measured)
		},
		"no sample for too long": func(g *guardTest) { g.now = g.now.Add(longestGap) },
		"another pod of the same name": func(g *guardTest) {
			for _, pod := range []string{"worst", "bad"} {
				g.uids[pod] = "another " + pod
			}
		},
		"its pod is not known": func(g *guardTest) {
			g.uids["worst"], g.uids["bad"] = "", ""
			g.look(g.Measure(g.t.Context()))
			clear(g.uids)
		},
		"within the limit": func(g *guardTest) {
			measured := g.Measure(g.t.Context())
			for i := range measured.GPUs[0].Units[0].Processes {
				measured.GPUs[0].Units[0].Processes[i].Memory = new(1.0)
			}
			g.look(measured)
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuardTest(t, true)
			g.pass(30 * time.Second)
			lapse(g)
			g.pass(30 * time.Second)
			g.wants("after a lapse", "")
			g.pass(5 * time.Second)
			if len(g.evicted) != 1 || !strings.HasSuffix(g.evicted[0], "worst") {
				t.Errorf("in the end evicted are %q", g.evicted)
			}
		})
	}
}

// TestGuardIsRefused holds what comes of evictions that cannot be: the next pod in turn is
// evicted, who was refused is tried again, and one that is gone is no failure.
func TestGuardIsRefused(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t, true)
	g.fail["ns/worst"] = fmt.Errorf("%w: 429", nodereport.ErrDisruptionBudget)
	g.fail["ns/bad"] = errors.New("no answer")
	g.pass(35 * time.Second)
	g.wants("refused", "bad, worst refused: "+nodereport.ErrDisruptionBudget.Error())
	g.evictOne(t.Context(), g.now)
	g.wants("both", "bad refused: no answer, worst refused: "+nodereport.ErrDisruptionBudget.Error())
	g.evictOne(t.Context(), g.now)
	g.want(g.series("memory_guard_evictions_total", "result"), "evicted:0 failed:1 refused:1")
	clear(g.fail)
	g.pass(10 * time.Second)
	g.wants("allowed again", "bad refused: no answer, worst evicted", "ns/worst")

	g = newGuardTest(t, true)
	g.fail["ns/worst"] = nodereport.ErrPodGone
	g.pass(35 * time.Second)
	g.evictOne(t.Context(), g.now)
	g.wants("gone", "bad evicted, worst", "ns/bad")
	g.want(g.series("memory_guard_evictions_total", "result"), "evicted:1 failed:0 refused:0")

	g = newGuardTest(t, true)
	g.Pods.Evict = nil
	g.pass(35 * time.Second)
	if told := g.told(); !strings.Contains(told, "worst refused: this Virgate may not evict pods: it takes --evict-over-limit") {
		t.Errorf("without the right: %s", told)
	}
}

// TestGuardOfAPodThatDoesNotEnd holds that one which never ends does not keep others for ever, and
// is not evicted again.
func TestGuardOfAPodThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t, true)
	g.pass(35 * time.Second)
	g.pass(evictionWait)
	g.wants("while it may take", "bad, worst evicted", "ns/worst")
	g.pass(5 * time.Second)
	g.wants("after that", "bad evicted, worst evicted", "ns/worst", "ns/bad")
}

// TestGuardUnwatched holds that a limit which nobody can watch is a warning of the plan.
func TestGuardUnwatched(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t, true)
	g.look(sharing.Measurement{Unwatched: true})
	if warnings := g.guard.warnings(); len(warnings) != 1 || !strings.Contains(warnings[0], "--watch-pods") {
		t.Errorf("warnings %q", warnings)
	}
	g.look(g.Measure(t.Context()))
	if warnings := g.guard.warnings(); warnings != nil {
		t.Errorf("when it is watched: %q", warnings)
	}
}
