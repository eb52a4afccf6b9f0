package report

import (
	"context"
	"strings"
	"testing"
	"time"
)

// TestRefusedAndBack refuses in every way, for each kind of request alone, and
// sees that the others go on and that the latest state is written afterwards.
func TestRefusedAndBack(t *testing.T) {
	for _, test := range []struct {
		path   string
		status int
	}{
		{"/nodes/n1", 409}, {"/nodes/n1", 403}, {"/nodes/n1", 500}, {"/nodes/n1", 404},
		{"/nodes/n1/status", 409}, {"/nodes/n1/status", 403}, {"/nodes/n1/status", 503},
		{"/events", 422}, {"/events", 403}, {"/events", 500}, {"/events", 429},
	} {
		t.Run(test.path+" "+string(rune('0'+test.status/100))+"xx", func(t *testing.T) {
			f := newFakeAPI(t)
			f.refuse[test.path] = test.status
			r := start(t, everything(f), fast())
			r.Report(applied("g1"))
			f.await("refused", func() bool {
				_, hasCondition := f.condition()
				refused := 0
				for _, request := range f.requests {
					if path := strings.Fields(request)[1]; strings.HasSuffix(path, test.path) {
						refused++
					}
				}
				others := (hasCondition || strings.Contains(test.path, "nodes")) && (len(f.events) == 1 || test.path == "/events") &&
					(f.node.Labels[StateLabel] != "" || test.path == "/nodes/n1")
				if test.status == 422 {
					return refused >= 1 && hasCondition // It is not asked again.
				}
				return refused >= 3 && others
			})
			next := applied("g2")
			next.Reason = "Latest"
			r.Report(next)
			f.change(func() { delete(f.refuse, test.path) })
			f.await("written", func() bool {
				c, _ := f.condition()
				told := 2
				if test.status == 422 {
					told = 1
				}
				return c.Reason == "Latest" && f.node.Annotations[GenerationAnnotation] == "g2" && len(f.events) == told
			})
		})
	}
}

// TestAway reports a thousand changes to an API that does not answer. The
// latest is written when it does, and of the events what the queue has kept.
func TestAway(t *testing.T) {
	f := newFakeAPI(t)
	f.hang = true
	quick := fast()
	quick.request = 500 * time.Millisecond
	quick.burst = 1000
	r := start(t, everything(f), quick)
	for i := range 1000 {
		r.Report(applied("g" + string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676))))
	}
	last := applied("last")
	r.Report(last)
	f.change(func() { f.hang = false })
	f.await("the last state", func() bool {
		return f.node.Annotations[GenerationAnnotation] == "last" && strings.Contains(strings.Join(f.told(), "\n"), "generation last")
	})
	f.change(func() {
		// The queue may drop the one that is being written.
		if len(f.events) > longestQueue+1 {
			t.Errorf("%d events were kept", len(f.events))
		}
	})
}

// TestStopIsQuick ends Run while requests hang.
func TestStopIsQuick(t *testing.T) {
	f := newFakeAPI(t)
	f.hang = true
	r, err := New(everything(f))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.Report(applied("g1"))
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("Run has not ended")
	}
}
