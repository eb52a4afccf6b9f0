package plugin

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
)

// TestStatusSaysWhatWasSent follows one server from its first list to one that
// differs in nothing that the kubelet sees.
func TestStatusSaysWhatWasSent(t *testing.T) {
	changed := make(signal, 1)
	m := NewManager(Options{})
	s := &server{name: "r", changed: changed}
	list := func(healthy bool) List {
		return List{Entries: []Entry{{Device: sharing.Device{ID: "GPU-a", Unit: "GPU-a", Healthy: healthy}, Phase: Offered}}}
	}
	next := func(healthy bool) {
		s.publish(newGeneration(sharing.Resource{Name: "r"}, list(healthy), terms{host: &Host{}}, nil, nil, s.current.Load()))
	}
	sent := func() bool { return m.Status().Resources[0].Sent }
	next(true)
	m.status.Store(&serving{servers: []*server{s}, superseded: make(chan struct{})})
	if sent() {
		t.Error("the first list is called sent before it is")
	}
	s.sent.Store(&delivery{generation: s.current.Load()})
	if !sent() {
		t.Error("the list that was sent is not called so")
	}
	next(true) // Streams have nothing to send.
	if !sent() {
		t.Error("a list that the kubelet has is not called sent")
	}
	next(false)
	if sent() {
		t.Error("a changed list is called sent before it is")
	}
}

// TestChangedWhenThePlanIsTakenUp has no server whose streams could be news.
func TestChangedWhenThePlanIsTakenUp(t *testing.T) {
	m := NewManager(Options{Dir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = m.Run(ctx) })
	defer func() { cancel(); running.Wait() }()
	m.Apply(sharing.Plan{})
	late := time.After(20 * time.Second)
	for !m.Status().Served {
		select {
		case <-m.Changed():
		case <-late:
			t.Fatal("nobody says that the plan is served")
		}
	}
}
