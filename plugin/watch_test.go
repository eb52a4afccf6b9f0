package plugin_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
)

// TestSocketWipedAfterTheStreamEnded: the look at the sockets rests while a stream
// is open, and is needed again when a registration after it hangs. Without it the
// kubelet would dial the wiped socket until the registration's deadline.
func TestSocketWipedAfterTheStreamEnded(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	first := b.kubelet.Snapshot().Resources[gpu]
	b.kubelet.SetSilent(true)
	b.kubelet.DropStream(gpu)
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations > first.Registrations })
	if err := os.Remove(filepath.Join(b.dir, filepath.Base(first.Socket))); err != nil {
		t.Fatal(err)
	}
	wiped := time.Now()
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations > first.Registrations+1 })
	// The other way to another registration is the end of this one's 15 s.
	if took := time.Since(wiped); took > 8*time.Second {
		t.Errorf("registered anew after %s", took)
	}
}

// TestOpenStreamIsLeftAlone: the kubelet needs neither socket's file while it has a
// stream, and would drop the stream for a registration beside it.
func TestOpenStreamIsLeftAlone(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	if err := os.Remove(filepath.Join(b.dir, filepath.Base(b.kubelet.Snapshot().Resources[gpu].Socket))); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(filepath.Join(b.dir, "kubelet.sock"), time.Time{}, time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(b.ctx, 500*time.Millisecond) // Nothing happens that could be awaited.
	defer cancel()
	if b.kubelet.Await(soon, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpu].Registrations > 1 || k.Resources[gpu].StreamsClosed > 0
	}) == nil {
		t.Error("a stream that is open was disturbed")
	}
	b.mustPod("p", gpu, 1)
}
