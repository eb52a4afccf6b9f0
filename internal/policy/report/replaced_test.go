package report

import (
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
)

// TestNodeMadeAnew deletes the Node and makes another: what is Virgate's is
// written to it too, at once when somebody sees it, else with the next try.
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
			slow.firstRetry, slow.lastRetry, slow.lastLook = time.Hour, time.Hour, time.Hour // Being seen ends backing off too.
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
			gone.Message, gone.State = "other", sharing.ProfilePending
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

// TestNodeMadeAnewUnderWay has the report be what it was, when the Node is there
// again after writing to none has failed.
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
	gone.State, gone.Reason = sharing.ProfileRejected, "Gone"
	r.Report(gone)
	f.await("404", func() bool {
		return f.count("PATCH /api/v1/nodes/n1 ") >= 2 && f.count("PATCH /api/v1/nodes/n1/status") >= 2
	})
	r.Report(applied("g1"))
	f.change(func() { f.node = newNode() })
	f.await("written again", written)
}
