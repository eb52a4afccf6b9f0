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
// of the API before it is time to refresh, and writes then.
func TestWritersRest(t *testing.T) {
	for _, test := range []struct {
		name    string
		refresh time.Duration
		writes  int // of three calls
	}{
		{"no refresh", 0, 1},
		{"later", time.Hour, 1},
		{"due", time.Nanosecond, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFakeAPI(t)
			client, err := connect(f.config(), nodeName, time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			writers := map[string]writer{
				"PATCH /api/v1/nodes/n1 ":       &metadata{reports: said{applied("g1")}, client: client, refresh: test.refresh},
				"PATCH /api/v1/nodes/n1/status": &condition{reports: said{applied("g1")}, client: client, refresh: test.refresh},
			}
			for request, writer := range writers {
				for range 3 {
					again, err := writer.write(t.Context())
					if err != nil || again != test.refresh {
						t.Errorf("%s again after %s, %v", request, again, err)
					}
				}
				if got := f.count(request); got != test.writes {
					t.Errorf("%d requests %s, want %d", got, request, test.writes)
				}
			}
			if got := f.count("GET"); got != 1 {
				t.Errorf("%d reads, want 1", got)
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
