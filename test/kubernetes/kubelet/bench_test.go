package kubelet

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	"github.com/virgate/virgate/plugin"
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	m.Run()
}

// bench is a node: a kubelet, and whoever serves it.
type bench struct {
	*kubelet
	log *slog.Logger
}

// newBench starts a kubelet. When the test ends, it fails if the kubelet
// crashed or a list broke a rule.
func newBench(t *testing.T, policy string) *bench {
	t.Helper()
	b := newNaiveBench(t, policy)
	t.Cleanup(func() {
		for _, stack := range b.crashes() {
			t.Errorf("this would have killed the kubelet: %s", stack)
		}
		for _, rule := range b.ledger.broken() {
			t.Error(rule)
		}
	})
	return b
}

// newNaiveBench starts a kubelet that may be hurt.
func newNaiveBench(t *testing.T, policy string) *bench {
	t.Helper()
	root, err := os.MkdirTemp("", "vg") //nolint:usetesting // a socket's path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	k := &kubelet{
		t: t, policy: policy, pods: &pods{},
		dir: filepath.Join(root, "plugins"), podResources: filepath.Join(root, "podresources.sock"),
	}
	k.ledger = newLedger(k.pods.holds)
	if err := os.Mkdir(k.dir, 0o750); err != nil {
		t.Fatal(err)
	}
	k.start()
	t.Cleanup(func() {
		k.end()
		_ = os.RemoveAll(root)
	})
	b := &bench{kubelet: k, log: slog.New(slog.DiscardHandler)}
	if testing.Verbose() && os.Getenv("VIRGATE_LOG") != "" {
		b.log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return b
}

// policies are the topology policies that every test of admission runs under.
func policies() []string {
	return []string{topologymanager.PolicyNone, topologymanager.PolicyBestEffort}
}

// quick makes removals happen within a test.
func quick() plugin.Timing {
	return plugin.Timing{Quiet: 50 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 200 * time.Millisecond}
}

// pause is between two looks at a condition.
func pause() { <-time.After(time.Millisecond) }

// patience is how long a condition may take that has no deadline of its own.
const patience = 15 * time.Second

// await waits until the condition holds.
func (b *bench) await(within time.Duration, condition func() bool, format string, args ...any) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), within)
	defer cancel()
	for !condition() {
		if ctx.Err() != nil {
			b.t.Fatalf("not within %s: %s", within, fmt.Sprintf(format, args...))
		}
		pause()
	}
}

// shows waits until the kubelet publishes these numbers of the resource.
func (b *bench) shows(resource string, capacity, allocatable int) {
	b.t.Helper()
	b.showsWithin(patience, resource, capacity, allocatable)
}

func (b *bench) showsWithin(within time.Duration, resource string, capacity, allocatable int) {
	b.t.Helper()
	var all, able int
	b.await(within, func() bool {
		all, able, _ = b.node(resource)
		return all == capacity && able == allocatable
	}, "%s with capacity %d and allocatable %d", resource, capacity, allocatable)
}

// run brings a pod to the node, which must take it.
func (b *bench) run(resource string, count int) *pod {
	b.t.Helper()
	p, err := b.admit(resource, count)
	if err != nil {
		b.t.Fatalf("admit a pod for %d of %s: %v", count, resource, err)
	}
	return p
}

// starts starts the pod's container again, which must get what it had.
func (b *bench) starts(p *pod) {
	b.t.Helper()
	visible, err := b.startContainer(p)
	if err != nil {
		b.t.Fatal(err)
	}
	if !slices.Equal(visible, unitsOf(p)) {
		b.t.Errorf("%s with %v starts with %v", p.Name, p.devices, visible)
	}
}
