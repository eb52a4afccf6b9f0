package plugin_test

import (
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
