package nodestatus

import (
	"errors"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/virgate/virgate/internal/nodereport"
)

// TestConditionKeepsItsTime restarts the reporter while the condition goes on,
// and changes its status later.
func TestConditionKeepsItsTime(t *testing.T) {
	f := newFakeAPI(t)
	began := metav1.NewTime(time.Now().Add(-time.Hour).Truncate(time.Second))
	f.node.Status.Conditions = append(f.node.Status.Conditions, corev1.NodeCondition{
		Type: ConditionType, Status: "True", Reason: "Old", LastTransitionTime: began,
	})
	r := start(t, everything(f), fast())
	r.Report(applied("g1"))
	f.await("the new reason", func() bool { c, _ := f.condition(); return c.Reason == "Serving" })
	f.change(func() {
		if c, _ := f.condition(); !c.LastTransitionTime.Equal(&began) {
			t.Errorf("began at %s, want %s", c.LastTransitionTime, began)
		}
	})
	broken := applied("g1")
	broken.Ready, broken.Reason = nodereport.ConditionFalse, "KubeletAway"
	r.Report(broken)
	f.await("False", func() bool { c, _ := f.condition(); return c.Status == "False" })
	f.change(func() {
		if c, _ := f.condition(); !c.LastTransitionTime.After(began.Time) {
			t.Errorf("began at %s, before it changed", c.LastTransitionTime)
		}
	})
}

func TestStaleResources(t *testing.T) {
	zero, one := resource.MustParse("0"), resource.MustParse("1")
	f := newFakeAPI(t)
	f.node.Status.Capacity = corev1.ResourceList{"nvidia.com/old": zero, "nvidia.com/used": one, "nvidia.com/theirs": zero, "nvidia.com/young": zero, "cpu": one}
	options := everything(f)
	brief := fast()
	r := start(t, options, brief)
	report := applied("g1")
	ago := time.Now().Add(-2 * time.Hour)
	report.Gone = []nodereport.GoneResource{{Name: "nvidia.com/missing", Since: ago}, {Name: "nvidia.com/old", Since: ago}, {Name: "nvidia.com/used", Since: ago}, {Name: "nvidia.com/young", Since: time.Now()}}
	r.Report(report)
	left := func() map[string]bool {
		names := map[string]bool{}
		for name := range f.node.Status.Capacity {
			names[string(name)] = true
		}
		return names
	}
	f.await("removed", func() bool { return !left()["nvidia.com/old"] })
	want := map[string]bool{"nvidia.com/used": true, "nvidia.com/theirs": true, "nvidia.com/young": true, "cpu": true}
	f.change(func() {
		if got := left(); !maps.Equal(got, want) {
			t.Errorf("left %v, want %v", got, want)
		}
	})
}

// TestStaleResourceInUseAgain changes the value between reading and patching: the patch must not remove it.
func TestStaleResourceInUseAgain(t *testing.T) {
	node := newNode()
	node.Status.Capacity = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("4")}
	f := newFakeAPI(t)
	f.node = node
	c, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := (&staleResources{client: c}).remove(t.Context(), "nvidia.com/gpu"); err != nil {
		t.Error(err)
	}
	if got := node.Status.Capacity["nvidia.com/gpu"]; got.String() != "4" {
		t.Errorf("capacity %s", got.String())
	}
}

// TestNodeMadeAnew deletes the Node and makes another. It gets everything of Virgate's: at once if the new Node
// is seen, else with the next try.
func TestNodeMadeAnew(t *testing.T) {
	for _, test := range []struct {
		name string
		seen bool
	}{
		{"seen", true},
		{"not seen", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFakeAPI(t)
			slow := fast()
			slow.retry, slow.withoutNode = wait.Backoff{Duration: time.Hour}, time.Hour // Being seen ends backing off too.
			if !test.seen {
				slow = fast()
			}
			r := start(t, everything(f), slow)
			r.Report(applied("g1"))
			written := func() bool {
				_, ok := f.condition()
				return ok && f.node.Annotations[GenerationAnnotation] == "g1"
			}
			f.await("written", written)
			f.change(func() { f.node = nil })
			gone := applied("g1")
			gone.Message, gone.State = "other", nodereport.ProfilePending
			r.Report(gone)
			f.await("404", func() bool {
				return f.count("PATCH /api/v1/nodes/n1 ") >= 2 && f.count("PATCH /api/v1/nodes/n1/status") >= 2
			})
			f.change(func() { f.node = newNode() })
			if test.seen {
				r.NodeReplaced()
			}
			f.await("written again", written)
		})
	}
}

// TestNodeMadeAnewDuringAPause has the Node replaced while a task pauses after a
// write that worked.
func TestNodeMadeAnewDuringAPause(t *testing.T) {
	f := newFakeAPI(t)
	slow := fast()
	slow.pace = time.Hour
	r := start(t, everything(f), slow)
	r.Report(applied("g1"))
	written := func() bool {
		_, ok := f.condition()
		return ok && f.node.Annotations[GenerationAnnotation] == "g1"
	}
	f.await("written", written)
	f.change(func() { f.node = newNode() })
	r.NodeReplaced()
	f.await("written again", written)
}

// TestNodeMadeAnewUnderWay goes back to an earlier report before the Node is there again, after a failed write.
func TestNodeMadeAnewUnderWay(t *testing.T) {
	f := newFakeAPI(t)
	r := start(t, everything(f), fast())
	r.Report(applied("g1"))
	written := func() bool {
		_, ok := f.condition()
		return ok && f.node.Annotations[GenerationAnnotation] == "g1"
	}
	f.await("written", written)
	f.change(func() { f.node = nil })
	gone := applied("g1")
	gone.State, gone.Reason = nodereport.ProfileRejected, "Gone"
	r.Report(gone)
	f.await("404", func() bool {
		return f.count("PATCH /api/v1/nodes/n1 ") >= 2 && f.count("PATCH /api/v1/nodes/n1/status") >= 2
	})
	r.Report(applied("g1"))
	f.change(func() { f.node = newNode() })
	f.await("written again", written)
}

// TestWritersRest calls each writer again with nothing new: it sends no request, and does not ask to be called
// again.
func TestWritersRest(t *testing.T) {
	f := newFakeAPI(t)
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	report := applied("g1")
	report.Layouts = []nodereport.GPULayout{{State: nodereport.LayoutApplied}}
	writers := map[string]writer{
		"PATCH /api/v1/nodes/n1 ":       &metadata{client: client},
		"PATCH /api/v1/nodes/n1/status": &condition{client: client},
	}
	for request, writer := range writers {
		for range 3 {
			if again, err := writer.write(t.Context(), report); err != nil || again != 0 {
				t.Errorf("%s again after %s, %v", request, again, err)
			}
		}
		if got := f.count(request); got != 1 {
			t.Errorf("%d requests %s, want 1", got, request)
		}
	}
	if got := f.count("GET"); got != 1 {
		t.Errorf("%d reads, want 1", got)
	}
}

// TestNothingUnasked checks that a standby, without a report, sends no requests.
func TestNothingUnasked(t *testing.T) {
	f := newFakeAPI(t)
	r, err := newReporter(Options{Config: f.config(), Node: nodeName, Events: true, Condition: true, Annotations: true, RemoveStale: true}, fast())
	if err != nil {
		t.Fatal(err)
	}
	if len(r.loops) != 4 {
		t.Errorf("%d loops, want 4", len(r.loops))
	}
	for _, loop := range r.loops {
		if again := loop.try(t.Context()); again != 0 || len(f.requests) > 0 {
			t.Errorf("again after %s, requests %q", again, f.requests)
		}
	}
}

// TestMIGLabel checks mig-manager's label: Virgate writes it only while it partitions a GPU, and removes it
// afterwards.
func TestMIGLabel(t *testing.T) {
	f := newFakeAPI(t)
	f.node.Labels[MIGStateLabel] = "theirs"
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	gpu := func(state nodereport.LayoutState) nodereport.Report {
		report := applied("g1")
		report.Layouts = []nodereport.GPULayout{{GPU: "GPU-a", Wanted: "x", State: state}}
		return report
	}
	refused := gpu(nodereport.LayoutApplied)
	refused.LayoutRefused = true
	left := applied("g2")
	left.LayoutsLeft = true
	m := &metadata{client: client}
	for _, step := range []struct {
		name   string
		report nodereport.Report
		want   string
		writes int
	}{
		{"no GPU is cut", applied("g1"), "theirs", 1},
		{"one waits", gpu(nodereport.LayoutPending), "pending", 2},
		{"still", gpu(nodereport.LayoutBlocked), "pending", 2},
		{"applied", gpu(nodereport.LayoutApplied), "success", 3},
		{"a name that is none", refused, "failed", 4},
		{"no GPU is cut any more", applied("g1"), "", 5},
		{"still not", applied("g1"), "", 5},
		{"still not, otherwise new", applied("g2"), "", 6},
		{"failed", gpu(nodereport.LayoutFailed), "failed", 7},
		{"left to mig-manager, which has written", left, "rebooting", 8},
		{"left to it still", left, "rebooting", 8},
		{"taken over", gpu(nodereport.LayoutPending), "pending", 9},
	} {
		if step.report.LayoutsLeft {
			f.node.Labels[MIGStateLabel] = "rebooting"
		}
		if _, err := m.write(t.Context(), step.report); err != nil {
			t.Fatal(err)
		}
		if got := f.node.Labels[MIGStateLabel]; got != step.want || f.count("PATCH") != step.writes {
			t.Errorf("%s: %q after %d writes, want %q after %d", step.name, got, f.count("PATCH"), step.want, step.writes)
		}
	}
}

// TestStaleMIGLabel starts with a label from an earlier run: it is removed if the profile in force asks for no
// layout, unless another program wrote it.
func TestStaleMIGLabel(t *testing.T) {
	for _, test := range []struct{ manager, section, want string }{
		{"virgate", "f:labels", ""}, {"mig-manager", "f:labels", "success"}, {"virgate", "f:annotations", "success"},
	} {
		f := newFakeAPI(t)
		f.node.Labels[MIGStateLabel] = "success"
		f.node.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet"}, {Manager: test.manager, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(
			`{"f:metadata":{"` + test.section + `":{".":{},"f:` + MIGStateLabel + `":{}}}}`)}}
		client, err := connect(f.config(), nodeName, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		m := &metadata{client: client}
		write := func(report nodereport.Report, want string, reads int) {
			t.Helper()
			if _, err := m.write(t.Context(), report); err != nil {
				t.Error(err)
			}
			if got := f.node.Labels[MIGStateLabel]; got != want || f.count("GET") != reads {
				t.Errorf("%s, %s: %q after %d readings, want %q after %d", test.manager, test.section, got, f.count("GET"), want, reads)
			}
		}
		report := applied("g1")
		write(report, "success", 0) // Whether a layout is wanted is not known yet.
		report.NoLayout = true
		f.refuse["/nodes/n1"] = 403
		if _, err := m.write(t.Context(), report); err == nil {
			t.Error("a refusal is no error")
		}
		f.refuse["/nodes/n1"] = 0
		before := f.count("GET")
		write(report, test.want, before+1)
		write(report, test.want, before+1)
		report.State = nodereport.ProfilePending
		write(report, test.want, before+1)
		if f.node.Labels[StateLabel] != "pending" {
			t.Errorf("labels %v", f.node.Labels)
		}
	}
}

// TestHeartbeat writes the condition again while nothing changes.
func TestHeartbeat(t *testing.T) {
	f := newFakeAPI(t)
	options := Options{Config: f.config(), Node: nodeName, Condition: true, Heartbeat: time.Millisecond}
	start(t, options, fast()).Report(applied("g1"))
	began := metav1.Time{}
	f.await("beats", func() bool {
		c, ok := f.condition()
		if ok && began.IsZero() {
			began = c.LastTransitionTime
		}
		return f.count("PATCH") > 5 && c.LastHeartbeatTime.After(began.Time) // Their times have whole seconds.
	})
	f.change(func() {
		if c, _ := f.condition(); !c.LastTransitionTime.Equal(&began) || c.Status != "True" || c.Reason != "Serving" {
			t.Errorf("%+v after heartbeats, it began at %s", c, began)
		}
		if n := f.count("GET"); n != 1 {
			t.Errorf("read %d times", n)
		}
	})
}

// TestHeartbeatIsNotEarly has a heartbeat that is due much later: only changes are written.
func TestHeartbeatIsNotEarly(t *testing.T) {
	f := newFakeAPI(t)
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	c := &condition{client: client, heartbeat: time.Hour}
	for range 2 {
		again, err := c.write(t.Context(), applied("g1"))
		if err != nil || again < 50*time.Minute || again > 72*time.Minute {
			t.Errorf("again after %s, %v; want about an hour", again, err)
		}
	}
	if n := f.count("PATCH"); n != 1 {
		t.Errorf("%d writes, want 1", n)
	}
}

// TestLeave ends a reporter for good.
func TestLeave(t *testing.T) {
	for _, test := range []struct {
		name            string
		condition, hang bool
		before, want    string
		because         error
	}{
		{name: "with an error", condition: true, before: "Serving", want: "Stopped", because: errors.New("no driver")},
		{name: "with an error, before anything was written", condition: true, want: "Stopped", because: errors.New("no driver")},
		{name: "serving", condition: true, before: "Serving", want: "Stopped"},
		{name: "drained", condition: true, before: "Draining", want: "Stopped"},
		{name: "it was never written", condition: true},
		{name: "not to be written", before: "Serving", want: "Serving"},
		{name: "no answer", condition: true, hang: true, before: "Serving", want: "Serving"},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFakeAPI(t)
			began := metav1.NewTime(time.Now().Add(-time.Hour).Truncate(time.Second))
			if test.before != "" {
				f.node.Status.Conditions = append(f.node.Status.Conditions, corev1.NodeCondition{
					Type: ConditionType, Status: "True", Reason: test.before, LastTransitionTime: began,
				})
			}
			f.hang = test.hang
			r, err := newReporter(Options{Config: f.config(), Node: nodeName, Condition: test.condition}, fast())
			if err != nil {
				t.Fatal(err)
			}
			r.Leave(t.Context(), test.because) // It must return also without an answer.
			c, found := f.condition()
			if c.Reason != test.want || found != (test.want != "") {
				t.Errorf("%+v", c)
			}
			if strings.HasSuffix(c.Message, "on this node: no driver") != (test.because != nil) {
				t.Errorf("%+v", c)
			}
			if test.want == "Stopped" && (c.Status != "Unknown" || c.Message == "" || !c.LastTransitionTime.After(began.Time)) {
				t.Errorf("%+v", c)
			}
		})
	}
}

// TestEventWhoseAnswerWasLost is made twice.
func TestEventWhoseAnswerWasLost(t *testing.T) {
	f := newFakeAPI(t)
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	event := eventOf(series{eventText: eventText{corev1.EventTypeNormal, ReasonProfileApplied, "m"}, name: "e", count: 1}, nodeName)
	for range 2 {
		if err := client.createEvent(t.Context(), event); err != nil {
			t.Error(err)
		}
	}
	if len(f.events) != 1 {
		t.Errorf("%d events", len(f.events))
	}
}

// TestEventThatIsForgotten is counted up after the API has deleted it.
func TestEventThatIsForgotten(t *testing.T) { synctest.Test(t, testEventThatIsForgotten) }

func testEventThatIsForgotten(t *testing.T) {
	f := newFakeAPI(t)
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	p := &eventWriter{queue: newEventQueue(fast()), client: client, log: slog.New(slog.DiscardHandler)}
	for range 2 {
		p.queue.add(warning(ReasonGPUUnhealthy, "m"), time.Now().Add(-time.Second))
		for range 100 { // It may be too soon to write it again.
			again, err := p.write(t.Context(), nodereport.Report{})
			if err != nil {
				t.Fatal(err)
			}
			if again == 0 {
				break
			}
			time.Sleep(again) //nolint:forbidigo // in a synctest bubble: the time is simulated
		}
		if len(f.events) != 1 || f.told()[0] != "GPUUnhealthy m x1" {
			t.Errorf("told %q", f.told())
		}
		clear(f.events)
	}
}
