package kubelet

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// node is the hardware, which a test may break.
type node struct {
	mu      sync.Mutex
	gpus    []sharing.GPU
	changed func()
}

// Inventory returns the GPUs.
func (n *node) Inventory() ([]sharing.GPU, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]sharing.GPU(nil), n.gpus...), nil
}

// Watch tells of faults.
func (n *node) Watch(ctx context.Context, changed func()) error {
	n.mu.Lock()
	n.changed = changed
	n.mu.Unlock()
	changed()
	<-ctx.Done()
	return nil
}

// fault breaks or, with an empty reason, heals a GPU.
func (n *node) fault(gpu int, reason string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gpus[gpu].Fault = reason
	if n.changed != nil {
		n.changed()
	}
}

// document writes a profile with so many replicas.
func document(replicas string) string {
	return "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: " + replicas + "}]}}\n"
}

// Invariants 1, 2 and 3 with the program's own loop between a profile in a file
// and the kubelet. Without the copy of health to every device in step.unit, a
// fault does not take its GPU away; a loop that planned without a profile would
// empty the node.
func TestProfileFile(t *testing.T) {
	b := newBench(t, topologymanager.PolicyNone)
	path := filepath.Join(t.TempDir(), "profile.yaml")
	write := func(text string) {
		t.Helper()
		// In one step: the loop also reads when nobody asks it to.
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	look := make(chan struct{})
	hardware := &node{gpus: boards("NVIDIA A100", 0, 4)}
	write(document("4"))
	file := &policy.File{Path: path}
	config, err := file.Config()
	if err != nil {
		t.Fatal(err)
	}
	file.Started = config.Process
	b.background(func(ctx context.Context) error {
		return agent.Run(ctx, agent.Options{
			Node: hardware, Policy: file,
			Plugin: plugin.NewManager(plugin.Options{Dir: b.dir, Timing: quick(), Logger: b.log}),
			Look:   look, Logger: b.log,
		})
	})
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 2)

	lists := b.ledger.tally(gpu).lists
	for _, bad := range []string{
		document("-1"), document("4, replica: 5"), document("many"), "version: v1\nsharing: [", "version: v2\n", "\x00",
	} {
		write(bad)
		// The loop takes the second order only when it has done the first.
		look <- struct{}{}
		look <- struct{}{}
		if got := b.ledger.tally(gpu); got.lists != lists {
			t.Fatalf("invariant 2: profile %q made a list: %v", bad, b.ledger.list(gpu))
		}
		b.delete(b.run(gpu, 1))
	}

	hardware.fault(2, "XID 79")
	b.shows(gpu, 16, 12)
	for id, healthy := range b.ledger.list(gpu) {
		unit, _, _ := sharing.ParseDeviceID(id)
		if sick := unit == hardware.gpus[2].UUID; healthy == sick {
			t.Errorf("invariant 3: %s is Healthy: %v", id, healthy)
		}
	}
	hardware.fault(2, "")
	b.shows(gpu, 16, 16)

	write(document("8"))
	look <- struct{}{}
	b.shows(gpu, 32, 32)
	b.starts(p)
	if got := b.ledger.tally(gpu); got.connections != 1 || got.losses != 0 {
		t.Errorf("invariant 1: registered %d times, lost %d times", got.connections, got.losses)
	}
}
