package kubelet

import (
	"os"
	"testing"
	"time"

	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// Invariants 4 and 5 over kubelet restarts: the sockets are wiped, the pods run
// on. Without session.wiped the resource stays lost.
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
				began := time.Now()
				if test.pluginFirst {
					b.showsWithin(time.Second, gpu, 16, 16)
				}
				if err := b.readmit(); err != nil {
					t.Fatalf("%s: %v", test.name, err)
				}
				b.showsWithin(time.Second-time.Since(began), gpu, 16, 16)
				b.starts(p)
				b.starts(q)
				b.delete(b.run(gpu, 1))
			}
		})
	}
}

// Virgate starts on a node without a device-plugins directory, which the kubelet
// makes later. Without another try in state.Acquire after the directory was not
// there, it serves nobody.
func TestKubeletComesLater(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	b.kill()
	if err := os.RemoveAll(b.dir); err != nil {
		t.Fatal(err)
	}
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 4}))
	nap(t.Context(), 500*time.Millisecond) // It has looked for the directory by now.
	if err := os.Mkdir(b.dir, 0o750); err != nil {
		t.Fatal(err)
	}
	b.await(patience, func() bool { return len(v.Status().Resources) == 1 }, "Virgate serves")
	b.start()
	b.showsWithin(time.Second, gpu, 8, 8)
	b.starts(b.run(gpu, 1))
	if got := b.ledger.tally(gpu); got.connections != 1 {
		t.Errorf("registered %d times", got.connections)
	}
}

// A storm in which the kubelet restarts and Virgate is relieved by another one,
// in turn. Each time every resource is registered once, and nothing else is
// lost.
func TestStormWithRestarts(t *testing.T) {
	const disturbances, between = 6, 50
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			s := newStorm(newBench(t, policy), 3, 3)
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

// disturb relieves Virgate by another one, or restarts the kubelet.
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

// Two Virgates on one node: the second stands by until the first ends, and the
// capacity is back within a second. Without the lock both serve.
func TestSuccession(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	v := b.startVirgate(quick())
	v.Apply(plan(4, profile{replicas: 4}))
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 3)

	guest := b.startVirgate(quick())
	guest.Apply(plan(4, profile{replicas: 2}))
	b.delete(b.run(gpu, 1))
	nap(t.Context(), 500*time.Millisecond) // It would serve by now, and wait for the barrier.
	if got := guest.Status().Resources; len(got) > 0 {
		t.Errorf("a second Virgate serves beside the first: %+v", got)
	}
	guest.stop(t)
	if got := b.ledger.tally(gpu); got.connections != 1 || got.losses != 0 || len(b.ledger.list(gpu)) != 16 {
		t.Errorf("one that came and went left %+v and %d devices", got, len(b.ledger.list(gpu)))
	}

	for range 3 {
		next := b.startVirgate(quick())
		next.Apply(plan(4, profile{replicas: 4}))
		began, losses := time.Now(), b.ledger.tally(gpu).losses
		v.stop(t)
		b.await(time.Second, func() bool { return b.ledger.tally(gpu).losses > losses }, "the kubelet to let go")
		b.showsWithin(time.Second-time.Since(began), gpu, 16, 16)
		b.starts(p)
		if err := b.resize(p); err != nil {
			t.Error(err)
		}
		v = next
	}
	if got := b.ledger.tally(gpu); got.connections != 4 || got.losses != 3 {
		t.Errorf("%d registrations and %d losses in 3 successions", got.connections, got.losses)
	}
}

// Virgate restarts with a profile that has fewer devices: what the last run
// listed comes first, whole, and then shrinks by the rules. Without
// reconciler.restore the successor's first list drops devices that were Healthy
// a moment ago.
func TestRestartWithFewer(t *testing.T) {
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, policy)
			timing := quick()
			timing.Quiet = time.Second
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
