package memoryguard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

const (
	mebibyte = 1 << 20
	gpu      = "GPU-a"
)

// guardTest is a node with one GPU in four shares, with a limit of 3 GiB for each container.
type guardTest struct {
	*Guard
	t   *testing.T
	now time.Time
	// measured has the processes, with 100 and more as PIDs; held are the pods' shares.
	measured sharing.Measurement
	held     []sharing.Allocation
	guard    sharing.MemoryGuard
	// uids are UIDs of pods that differ from their names; evicted are UIDs in order; fail has the errors of Evict by
	// UID.
	uids    map[string]string
	evicted []string
	fail    map[string]error
}

func newGuardTest(t *testing.T) *guardTest {
	g := &guardTest{t: t, now: time.Now(), uids: map[string]string{}, fail: map[string]error{}}
	g.Guard = New(Options{
		Logger:          slog.New(slog.DiscardHandler),
		WarningsChanged: func() {},
		LimitsChanged:   func() {},
		Pods: Pods{
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
		},
	})
	g.guard = sharing.MemoryGuard{Bytes: 3072 * mebibyte, Grace: 30 * time.Second, Evict: true}
	g.measured = sharing.Measurement{
		GPUs:   []sharing.GPUUtilization{{GPU: gpu, Units: []sharing.UnitProcesses{{Unit: gpu}}}},
		Owners: map[int]sharing.ProcessOwner{},
	}
	g.pod("worst", 6000*mebibyte)
	g.pod("bad", 4000*mebibyte)
	g.pod("good", 3072*mebibyte)
	g.process("", 5000*mebibyte)
	g.process("stranger", 9000*mebibyte)
	return g
}

// pod gives the next share to a pod with one process.
func (g *guardTest) pod(name string, memory float64) {
	g.held = append(g.held, sharing.Allocation{
		Namespace: "ns",
		Pod:       name,
		Container: "main",
		Resource:  "r",
		Devices:   []string{sharing.NewDeviceID(gpu, len(g.held))},
	})
	g.process(name, memory)
}

// process starts a process of the pod; with an empty name its owner is unknown.
func (g *guardTest) process(pod string, memory float64) {
	processes := &g.measured.GPUs[0].Units[0].Processes
	pid := 100 + len(*processes)
	*processes = append(*processes, sharing.ProcessUtilization{PID: pid, Memory: &memory})
	if pod != "" {
		container := sharing.Container{Namespace: "ns", Pod: pod, Name: "main"}
		g.measured.Owners[pid] = sharing.ProcessOwner{Container: container}
	}
}

// end ends the pod and its process.
func (g *guardTest) end(pod string) {
	g.held = slices.DeleteFunc(g.held, func(a sharing.Allocation) bool { return a.Pod == pod })
	unit := &g.measured.GPUs[0].Units[0]
	unit.Processes = slices.DeleteFunc(unit.Processes, func(p sharing.ProcessUtilization) bool {
		return g.measured.Owners[p.PID].Container.Pod == pod
	})
}

// pass lets so much time pass, with a sample every five seconds, and then lets the guard act.
func (g *guardTest) pass(length time.Duration) {
	g.t.Helper()
	for end := g.now.Add(length); g.now.Before(end); {
		g.now = g.now.Add(min(5*time.Second, end.Sub(g.now)))
		g.look(g.measured)
	}
	g.evictOne(g.t.Context(), g.now)
}

func (g *guardTest) look(measured sharing.Measurement) {
	gpus := []sharing.GPU{{UUID: gpu, Memory: 15360 * mebibyte}}
	unit := sharing.Unit{ID: gpu, GPU: gpu, Replicas: 4, Guard: g.guard}
	resources := []sharing.Resource{{Name: "r", Units: []sharing.Unit{unit}}}
	g.Look(Sample{
		Report:   sharing.NewUtilizationReport(measured, gpus, resources, g.held, true),
		GPUs:     gpus,
		Planned:  resources,
		Listed:   resources,
		Held:     g.held,
		At:       g.now,
		Interval: 5 * time.Second,
	})
}

// told lists the pods over their limits, with the result of their eviction.
func (g *guardTest) told() string {
	var texts []string
	for _, o := range g.OverLimits() {
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

// wantCounts compares the counts of evictions.
func (g *guardTest) wantCounts(want map[string]int) {
	g.t.Helper()
	if diff := cmp.Diff(want, g.Evictions()); diff != "" {
		g.t.Errorf("evictions (-want +got):\n%s", diff)
	}
}

// TestGuardEvicts checks the order of evictions: after the grace, the pod with the most memory beyond its limit,
// and the next once that one has ended. No other pod is evicted.
func TestGuardEvicts(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t)
	g.pass(30 * time.Second)
	g.wants("within the grace", "")
	g.pass(5 * time.Second)
	g.wants("after it", "bad, worst evicted", "ns/worst")
	g.pass(time.Minute)
	g.wants("while it ends", "bad, worst evicted", "ns/worst")
	g.end("worst")
	g.pass(5 * time.Second)
	g.wants("when it has ended", "bad evicted", "ns/worst", "ns/bad")
	g.end("bad")
	g.pass(5 * time.Minute)
	g.wants("when both have", "", "ns/worst", "ns/bad")
	g.wantCounts(map[string]int{"evicted": 2, "refused": 0, "failed": 0})
}

// TestGuardOnlyReports checks that no pod is evicted unless the profile says so.
func TestGuardOnlyReports(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t)
	g.guard.Evict = false
	g.pass(time.Minute)
	g.wants("reported", "bad, worst")
	want := "container main of pod ns/bad uses 4000 MiB of GPU-a and may use 3072 MiB, for longer than 30s"
	if list := g.OverLimits(); list[0].Text != want {
		t.Errorf("text %q, want %q", list[0].Text, want)
	}
	g.wantCounts(map[string]int{"evicted": 0, "refused": 0, "failed": 0})
}

// TestGuardIsCertain checks that a moment of uncertainty restarts the grace.
func TestGuardIsCertain(t *testing.T) {
	t.Parallel()
	for name, lapse := range map[string]func(g *guardTest){
		"nobody knows whose the processes are": func(g *guardTest) {
			measured := g.measured
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
			g.look(g.measured)
			clear(g.uids)
		},
		"within the limit": func(g *guardTest) {
			processes := slices.Clone(g.measured.GPUs[0].Units[0].Processes)
			for i := range processes {
				processes[i].Memory = new(1.0)
			}
			units := []sharing.UnitProcesses{{Unit: gpu, Processes: processes}}
			g.look(sharing.Measurement{
				GPUs:   []sharing.GPUUtilization{{GPU: gpu, Units: units}},
				Owners: g.measured.Owners,
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuardTest(t)
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

// TestGuardIsRefused checks refused evictions: the next pod in turn is evicted, the refused one is tried again,
// and a pod that is gone is no failure.
func TestGuardIsRefused(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t)
	g.fail["ns/worst"] = fmt.Errorf("%w: 429", nodereport.ErrDisruptionBudget)
	g.fail["ns/bad"] = errors.New("no answer")
	g.pass(35 * time.Second)
	g.wants("refused", "bad, worst refused: "+nodereport.ErrDisruptionBudget.Error())
	g.evictOne(t.Context(), g.now)
	g.wants("both", "bad refused: no answer, worst refused: "+nodereport.ErrDisruptionBudget.Error())
	g.evictOne(t.Context(), g.now)
	g.wantCounts(map[string]int{"evicted": 0, "refused": 1, "failed": 1})
	clear(g.fail)
	g.pass(10 * time.Second)
	g.wants("allowed again", "bad refused: no answer, worst evicted", "ns/worst")

	g = newGuardTest(t)
	g.fail["ns/worst"] = nodereport.ErrPodGone
	g.pass(35 * time.Second)
	g.evictOne(t.Context(), g.now)
	g.wants("gone", "bad evicted, worst", "ns/bad")
	g.wantCounts(map[string]int{"evicted": 1, "refused": 0, "failed": 0})

	g = newGuardTest(t)
	g.fail["ns/worst"] = fmt.Errorf("%w: of another node", nodereport.ErrMayNotEvict)
	g.pass(35 * time.Second)
	g.wants("by a policy", "bad, worst refused: "+nodereport.ErrMayNotEvict.Error()+": of another node")

	g = newGuardTest(t)
	g.Pods.Evict = nil
	g.pass(35 * time.Second)
	const refused = "worst refused: this Virgate may not evict pods: that requires --evict-over-limit"
	if told := g.told(); !strings.Contains(told, refused) {
		t.Errorf("without the right: %s", told)
	}
}

// TestGuardOfAPodThatDoesNotEnd checks that a pod that never ends does not block others forever, and is not
// evicted again.
func TestGuardOfAPodThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t)
	g.pass(35 * time.Second)
	g.pass(evictionWait)
	g.wants("while it may take", "bad, worst evicted", "ns/worst")
	g.pass(5 * time.Second)
	g.wants("after that", "bad evicted, worst evicted", "ns/worst", "ns/bad")
}

// TestGuardUnwatched checks that a limit that cannot be watched is a warning of the plan.
func TestGuardUnwatched(t *testing.T) {
	t.Parallel()
	g := newGuardTest(t)
	g.look(sharing.Measurement{Unwatched: true})
	if warnings := g.Warnings(); len(warnings) != 1 || !strings.Contains(warnings[0], "--watch-pods") {
		t.Errorf("warnings %q", warnings)
	}
	g.look(g.measured)
	if warnings := g.Warnings(); warnings != nil {
		t.Errorf("when it is watched: %q", warnings)
	}
}
