package kubelet

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// document writes a profile with this many replicas.
func document(replicas string) string {
	return "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: " + replicas + "}]}}\n"
}

// Invariants 1, 2 and 3 with the whole program between a profile in a file, a simulated driver and the
// kubelet. Without the copy of health to every device, a fault does not withdraw its GPU; a
// loop that planned without a profile would empty the node.
func TestProfileFile(t *testing.T) {
	b := newBench(t, topologymanager.PolicyNone)
	path := filepath.Join(t.TempDir(), "profile.yaml")
	write := func(text string) {
		t.Helper()
		// In one step: the loop also reads without a signal.
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	look := make(chan os.Signal)
	hardware, err := simnode.New("t4x4")
	if err != nil {
		t.Fatal(err)
	}
	do := func(verb string, arguments map[string]string) {
		t.Helper()
		if err := hardware.Do(verb, arguments); err != nil {
			t.Fatal(err)
		}
	}
	write(document("4"))
	b.background(func(ctx context.Context) error {
		return daemon.Run(ctx, daemon.Options{
			GPUs:      func(configs.StartupSettings) (daemon.GPUs, error) { return daemon.Simulated(hardware, hardware), nil },
			Profile:   daemon.ProfileOptions{Path: path},
			PluginDir: b.dir, PodResourcesSocket: b.podResources, Timing: quick(), Probe: 100 * time.Millisecond,
			Settings: agent.Settings{Reload: look, Logger: b.log},
		})
	})
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 2)

	lists := b.history.counts(gpu).lists
	for _, bad := range []string{
		document("-1"), document("4, replica: 5"), document("many"), "version: v1\nsharing: [", "version: v2\n", "\x00",
	} {
		write(bad)
		// The loop receives the second signal only after it has handled the first.
		look <- syscall.SIGHUP
		look <- syscall.SIGHUP
		if got := b.history.counts(gpu); got.lists != lists {
			t.Fatalf("invariant 2: profile %q made a list: %v", bad, b.history.list(gpu))
		}
		b.delete(b.run(gpu, 1))
	}

	// An event before the program listens is lost, but a probe also finds a GPU off the bus.
	do("xid", map[string]string{"gpu": "2", "code": "79"})
	b.shows(gpu, 16, 12)
	for id, healthy := range b.history.list(gpu) {
		unit, _, _ := sharing.ParseDeviceID(id)
		if faulty := unit == hardware.GPUs()[2].UUID; healthy == faulty {
			t.Errorf("invariant 3: %s is Healthy: %v", id, healthy)
		}
	}
	do("heal", map[string]string{"gpu": "2"})
	b.shows(gpu, 16, 16)

	write(document("8"))
	look <- syscall.SIGHUP
	b.shows(gpu, 32, 32)
	b.starts(p)
	if got := b.history.counts(gpu); got.connections != 1 || got.losses != 0 {
		t.Errorf("invariant 1: registered %d times, lost %d times", got.connections, got.losses)
	}
}

// graceOver is longer than a kubelet remembers a stopped plugin.
const graceOver = 5*time.Minute + time.Second

// Invariant 5 over a rename, with a restart of Virgate half-way and container restarts after the kubelet's
// five minutes. If Next did not drain a dropped resource (which keeps its list), or without the lists of
// the last run, the old name's endpoint stops, and five minutes later containers do not start.
func TestRenameWithPodsHolding(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			v := b.startVirgate(quick())
			v.Apply(plan(4, profile{replicas: 1}))
			b.shows(gpu, 4, 4)
			p := b.run(gpu, 2)

			renamed := plan(4, profile{resource: shared, replicas: 3})
			v.Apply(renamed)
			b.shows(gpu, 2, 0) // Unhealthy, so that no waiting pod takes them next.
			b.shows(shared, 6, 6)
			q := b.run(shared, 1)

			b.halt(v, gpu, shared)
			v = b.startVirgate(quick())
			v.Apply(renamed)
			// The kubelet shows the same of the old name without a plugin.
			b.await(func() bool { return b.history.counts(gpu).connections == 2 }, "the old name registered again")
			b.shows(gpu, 2, 0)
			b.shows(shared, 6, 6)
			for _, resource := range []string{gpu, shared} {
				if setBack(b.manager, resource, graceOver) {
					t.Errorf("the kubelet counts the minutes until it forgets %s", resource)
				}
			}
			b.node(gpu) // The kubelet forgets resources when it counts them.
			b.starts(p)
			b.starts(q)
			b.delete(p)
			b.shows(shared, 12, 12)
			b.await(func() bool { return b.history.counts(gpu).losses == 2 }, "the old name's end")
			if list := b.history.list(gpu); len(list) != 0 {
				t.Errorf("the old name ends with %v in its list", list)
			}
			b.shows(gpu, 0, 0)
			b.starts(q)
		})
	}
}

// The counterpart of the test above, which proves that it tests something: when a plugin ends for good,
// containers no longer start.
func TestGraceEnds(t *testing.T) {
	b := newBench(t, topologymanager.PolicyNone)
	v := b.startVirgate(quick())
	v.Apply(plan(1, profile{replicas: 2}))
	b.shows(gpu, 2, 2)
	p := b.run(gpu, 1)
	b.halt(v, gpu)
	b.shows(gpu, 2, 0)
	b.starts(p)
	if !setBack(b.manager, gpu, graceOver) {
		t.Fatal("the plugin has not stopped")
	}
	b.shows(gpu, 0, 0)
	if visible, err := b.startContainer(p); err == nil {
		t.Errorf("a container started with %v", visible)
	}
}
