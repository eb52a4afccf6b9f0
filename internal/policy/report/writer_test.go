package report

import (
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/sharing"
)

// said is always the same report.
type said struct{ sharing.NodeReport }

func (s said) report() (sharing.NodeReport, bool) { return s.NodeReport, true }

// TestWritersRest has each writer asked again with nothing new: it asks nothing
// of the API, and wants to be called no more.
func TestWritersRest(t *testing.T) {
	f := newFakeAPI(t)
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	report := applied("g1")
	report.Layouts = []sharing.BoardLayout{{State: sharing.LayoutApplied}}
	writers := map[string]writer{
		"PATCH /api/v1/nodes/n1 ":       &metadata{reports: said{report}, client: client},
		"PATCH /api/v1/nodes/n1/status": &condition{reports: said{report}, client: client},
	}
	for request, writer := range writers {
		for range 3 {
			if again, err := writer.write(t.Context()); err != nil || again != 0 {
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

// TestNothingUnasked is what a program that stands by does: nothing is reported,
// and nothing is asked of the API.
func TestNothingUnasked(t *testing.T) {
	f := newFakeAPI(t)
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for name, writer := range map[string]writer{
		"metadata":  &metadata{reports: &Reporter{}, client: client},
		"condition": &condition{reports: &Reporter{}, client: client},
		"postman":   &postman{queue: newQueue(fast()), client: client, log: slog.New(slog.DiscardHandler)},
		"remover":   &remover{reports: &Reporter{}, client: client},
	} {
		if again, err := writer.write(t.Context()); err != nil || again != 0 || len(f.requests) > 0 {
			t.Errorf("%s: again after %s, %v, requests %q", name, again, err, f.requests)
		}
	}
}

// TestMIGLabel holds who writes mig-manager's label: nobody where Virgate cuts no
// board, and nobody any more when it has stopped.
func TestMIGLabel(t *testing.T) {
	f := newFakeAPI(t)
	f.node.Labels[MIGStateLabel] = "theirs"
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	board := func(state sharing.LayoutState) sharing.NodeReport {
		report := applied("g1")
		report.Layouts = []sharing.BoardLayout{{GPU: "GPU-a", Wanted: "x", State: state}}
		return report
	}
	refused := board(sharing.LayoutApplied)
	refused.LayoutRefused = true
	m := &metadata{client: client}
	for _, step := range []struct {
		name   string
		report sharing.NodeReport
		want   string
		writes int
	}{
		{"no board is cut", applied("g1"), "theirs", 1},
		{"one waits", board(sharing.LayoutPending), "pending", 2},
		{"still", board(sharing.LayoutBlocked), "pending", 2},
		{"applied", board(sharing.LayoutApplied), "success", 3},
		{"a name that is none", refused, "failed", 4},
		{"no board is cut any more", applied("g1"), "", 5},
		{"still not", applied("g1"), "", 5},
		{"still not, otherwise new", applied("g2"), "", 6},
		{"failed", board(sharing.LayoutFailed), "failed", 7},
	} {
		m.reports = said{step.report}
		if _, err := m.write(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := f.node.Labels[MIGStateLabel]; got != step.want || f.count("PATCH") != step.writes {
			t.Errorf("%s: %q after %d writes, want %q after %d", step.name, got, f.count("PATCH"), step.want, step.writes)
		}
	}
}

// TestEventWhoseAnswerWasLost is made twice.
func TestEventWhoseAnswerWasLost(t *testing.T) {
	f := newFakeAPI(t)
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	event := eventOf(series{notice: notice{corev1.EventTypeNormal, ProfileApplied, "m"}, name: "e", count: 1}, nodeName)
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
func TestEventThatIsForgotten(t *testing.T) {
	f := newFakeAPI(t)
	client, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	p := &postman{queue: newQueue(fast()), client: client, log: slog.New(slog.DiscardHandler)}
	for range 2 {
		p.queue.add(warning(GPUUnhealthy, "m"), time.Now().Add(-time.Second))
		for range 100 { // It may be too soon to write it again.
			again, err := p.write(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if again == 0 {
				break
			}
			time.Sleep(again) //nolint:forbidigo // the queue names a time and nothing else
		}
		if len(f.events) != 1 || f.told()[0] != "GPUUnhealthy m x1" {
			t.Errorf("told %q", f.told())
		}
		clear(f.events)
	}
}
