package kubelet

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	deviceplugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// Invariants 4 and 5 over kubelet restarts: the sockets are removed, the pods run on. Without session.wiped
// the resource stays lost.
func TestKubeletRestarts(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			v := b.startVirgate(quick())
			v.Apply(plan(4, profile{replicas: 4}))
			b.shows(gpu, 16, 16)
			p, q := b.run(gpu, 2), b.run(gpu, 1)
			for _, test := range []struct {
				name        string
				away        time.Duration
				pluginFirst bool
			}{{"pods first", 0, false}, {"plugin first", 0, true}, {"away for a while", 400 * time.Millisecond, true}} {
				b.restart(test.away)
				if test.pluginFirst {
					b.shows(gpu, 16, 16)
				}
				if err := b.readmit(); err != nil {
					t.Fatalf("%s: %v", test.name, err)
				}
				b.shows(gpu, 16, 16)
				b.starts(p)
				b.starts(q)
				b.delete(b.run(gpu, 1))
			}
		})
	}
}

// Virgate starts on a node without a device-plugins directory, which the kubelet makes later. If
// state.Acquire did not retry, Virgate would never serve.
func TestKubeletComesLater(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	b.kill()
	if err := os.RemoveAll(b.dir); err != nil {
		t.Fatal(err)
	}
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 4}))
	if err := <-v.waits; !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("it waits for %v, want the directory", err)
	}
	if err := os.Mkdir(b.dir, 0o750); err != nil {
		t.Fatal(err)
	}
	b.await(func() bool { return len(v.Status().Resources) == 1 }, "Virgate serves")
	b.start()
	b.shows(gpu, 8, 8)
	b.starts(b.run(gpu, 1))
	if got := b.history.counts(gpu); got.connections != 1 {
		t.Errorf("registered %d times", got.connections)
	}
}

// A storm in which the kubelet restarts and another Virgate takes over, in turn. Each time every resource
// is registered once, and nothing else is lost.
func TestStormWithRestarts(t *testing.T) {
	const disturbances, between = 6, 50
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			s := newStorm(newBench(t, policy), quick(), 3, 3)
			done := 0
			s.rage(func(admitted int) bool {
				if due := min(admitted/between, disturbances); due > done {
					done = due
					s.disturb(done%2 == 0)
				}
				return admitted < (disturbances+1)*between
			})
			for _, model := range s.models {
				s.flip(model, profile{replicas: 8})
				s.shows(s.resource(model), 8*s.units, 8*s.units)
			}
			all := s.total()
			t.Logf("lists: %+v", all)
			if n := len(s.models) * disturbances; all.losses != n || all.connections != n+len(s.models) {
				t.Errorf("%d losses and %d registrations after %d disturbances of %d resources", all.losses, all.connections, done, len(s.models))
			}
		})
	}
}

// disturb lets another Virgate take over, or restarts the kubelet.
func (s *storm) disturb(virgate bool) {
	if !virgate {
		s.restart(0)
		if err := s.readmit(); err != nil {
			s.t.Error(err)
		}
		return
	}
	next := s.startVirgate(quick())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.virgate.stop(s.t)
	s.virgate = next
	s.virgate.Apply(planAll(s.models, s.units, s.profiles))
}

// Two Virgates on one node: the second stands by until the first ends, and brings the
// capacity back. Without the lock both serve.
func TestSuccession(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	v := b.startVirgate(quick())
	v.Apply(plan(4, profile{replicas: 4}))
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 3)

	guest := b.startVirgate(quick())
	guest.Apply(plan(4, profile{replicas: 2}))
	b.delete(b.run(gpu, 1))
	if err := <-guest.waits; !errors.Is(err, state.ErrLocked) {
		t.Errorf("a second Virgate waits for %v, want the first", err)
	}
	if got := guest.Status().Resources; len(got) > 0 {
		t.Errorf("a second Virgate serves beside the first: %+v", got)
	}
	guest.stop(t)
	if got := b.history.counts(gpu); got.connections != 1 || got.losses != 0 || len(b.history.list(gpu)) != 16 {
		t.Errorf("one that came and went left %+v and %d devices", got, len(b.history.list(gpu)))
	}

	for succession := range 3 {
		next := b.startVirgate(quick())
		next.Apply(plan(4, profile{replicas: 4}))
		v.stop(t)
		b.await(func() bool { return b.history.counts(gpu).connections == succession+2 }, "the next one registered")
		b.shows(gpu, 16, 16)
		b.starts(p)
		if err := b.resize(p); err != nil {
			t.Error(err)
		}
		v = next
	}
	if got := b.history.counts(gpu); got.connections != 4 || got.losses != 3 {
		t.Errorf("%d registrations and %d losses in 3 successions", got.connections, got.losses)
	}
}

// Virgate restarts with a profile that has fewer devices. Its first list has everything that the last run
// listed; then it shrinks by the rules. Without reconciler.restore the first list drops devices that were
// Healthy a moment ago.
func TestRestartWithFewer(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			timing := quick()
			timing.RemovalDelay = time.Second
			v := b.startVirgate(timing)
			v.Apply(plan(2, profile{replicas: 8}))
			b.shows(gpu, 16, 16)
			p := b.run(gpu, 6)
			b.halt(v, gpu)
			v = b.startVirgate(timing)
			v.Apply(plan(2, profile{replicas: 2}))
			held := b.heldOf(p)
			kept := max(2, held[0]) + max(2, held[1])
			b.shows(gpu, kept, kept)
			b.starts(p)
			if err := b.resize(p); err != nil {
				t.Error(err)
			}
			b.delete(p)
			b.shows(gpu, 4, 4)
		})
	}
}

// Invariant 10: stopping never waits for the kubelet, in whatever state that is, and leaves no goroutine
// and no socket behind. Without the context in server.register a silent kubelet delays it, and without
// session.close the streams do.
func TestStop(t *testing.T) {
	for _, test := range []struct {
		name  string
		state func(*bench, *virgate)
		// silent is true if the kubelet never answers a registration.
		silent bool
	}{
		{name: "registered", state: func(b *bench, _ *virgate) { b.shows(gpu, 32, 32) }},
		{name: "shrinking", state: func(b *bench, v *virgate) {
			b.shows(gpu, 32, 32)
			v.Apply(plan(4, profile{replicas: 2}))
			b.await(func() bool { _, able, _ := b.node(gpu); return able == 8 }, "shrinking")
		}},
		{name: "renaming", state: func(b *bench, v *virgate) {
			b.shows(gpu, 32, 32)
			b.run(gpu, 1)
			v.Apply(plan(4, profile{resource: shared, replicas: 2}))
			b.await(func() bool { _, able, _ := b.node(shared); return able == 6 }, "renaming")
		}},
		{name: "just dropped", state: func(b *bench, _ *virgate) {
			b.shows(gpu, 32, 32)
			b.drop(gpu)
		}},
		{name: "at once", state: func(*bench, *virgate) {}},
		{name: "registering with a silent kubelet", state: func(*bench, *virgate) {}, silent: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, topologymanager.PolicyNone)
			asked, answer := make(chan struct{}, 1), make(chan struct{})
			if test.silent {
				b.observer.slow = func(plugin deviceplugin.DevicePlugin) deviceplugin.DevicePlugin {
					asked <- struct{}{}
					<-answer
					return plugin
				}
			}
			t.Cleanup(func() { close(answer) })
			timing := quick()
			timing.RegisterTimeout = time.Hour // It does not give up by itself.
			v := b.startVirgate(timing)
			v.Apply(plan(4, profile{replicas: 8}))
			test.state(b, v)
			if test.silent {
				<-asked
			}
			v.stop(t) // While the answer of a silent kubelet is outstanding.
			// A goroutine that was waited for may not have ended completely.
			await.Until(t, "the end of Virgate's goroutines", func() error {
				if left := virgateGoroutines(); left != "" {
					return errors.New(left)
				}
				return nil
			})
			if left, err := filepath.Glob(filepath.Join(b.dir, "virgate-*.sock")); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
			b.await(func() bool { _, able, _ := b.node(gpu); return able == 0 }, "the kubelet to notice")
		})
	}
}

// Before an uninstall, Virgate applies an empty plan and waits. What a pod holds stays listed as Unhealthy
// as long as the pod has it. In the end the list is empty, so that the kubelet publishes 0 while the plugin
// still exists. Without inputs.held the pod loses its devices.
func TestDrain(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 2)

	nothing := sharing.Plan{Health: plan(2, profile{replicas: 8}).Health}
	v.Apply(nothing)
	b.shows(gpu, 2, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond) // Ten times the removal delay.
	defer cancel()
	if err := v.AwaitStopped(ctx); err == nil {
		t.Error("drained, although a pod holds devices")
	}
	b.shows(gpu, 2, 0)
	b.starts(p)

	b.delete(p)
	if err := v.AwaitStopped(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := b.history.list(gpu); len(got) > 0 {
		t.Errorf("the last list has %v", got)
	}
	b.shows(gpu, 0, 0)
}

// virgateGoroutines returns the stacks of goroutines in the plugin package.
func virgateGoroutines() string {
	stacks := make([]byte, 4<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var left []byte
	for stack := range bytes.SplitSeq(stacks, []byte("\n\n")) {
		if bytes.Contains(stack, []byte("virgate/virgate/plugin.")) {
			left = append(append(left, stack...), '\n')
		}
	}
	return string(left)
}
