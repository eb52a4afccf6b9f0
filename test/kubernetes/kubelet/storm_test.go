package kubelet

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
)

// storm is a node on which everything changes at once: pods come, go, are
// resized and start their containers again, while the profile of each resource
// flips.
type storm struct {
	*bench
	virgate *virgate
	random  *rand.Rand // of the goroutine that admits
	models  []string
	// units is the number of GPUs of each model.
	units int

	mu       sync.Mutex
	profiles map[string]profile
	// faulted is when a plan last made a unit faulty or still had it so.
	faulted map[string]time.Time

	// paced is the number of admissions tried.
	paced atomic.Int64
	outcome
}

// outcome is what came of the admissions.
type outcome struct{ tried, admitted, rejected, faulty, overtaken, resized, refusedResize int }

// fewest is the number of replicas below which no profile of a storm goes.
const fewest = 2

func newStorm(b *bench, models, units int) *storm {
	s := &storm{
		bench: b, virgate: b.startVirgate(quick()), random: rand.New(rand.NewPCG(1, 2)), units: units,
		profiles: map[string]profile{}, faulted: map[string]time.Time{},
	}
	for i := range models {
		model := fmt.Sprintf("M%d", i)
		s.models = append(s.models, model)
		s.profiles[model] = profile{resource: s.resource(model), replicas: 4}
	}
	s.flip(s.models[0], s.profiles[s.models[0]])
	for _, model := range s.models {
		b.shows(s.resource(model), 4*units, 4*units)
	}
	return s
}

func (s *storm) resource(model string) string { return "nvidia.com/" + model }

// flip changes the profile of one model.
func (s *storm) flip(model string, p profile) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.resource = s.resource(model)
	s.profiles[model] = p
	plan := planAll(s.models, s.units, s.profiles)
	for unit, fault := range plan.Faults {
		if fault != "" {
			s.faulted[unit] = time.Now()
		}
	}
	s.virgate.Apply(plan)
}

// perRound is how many pods come between two rounds of flips of a resource at
// the least, so that a slow disk slows both.
const perRound = 60

// flips changes the profile of one model until ctx ends, in rounds: from many
// replicas, through a burst of anything, to few, until IDs have really left the
// list.
func (s *storm) flips(ctx context.Context, model string, random *rand.Rand) {
	for round := int64(0); ctx.Err() == nil; round++ {
		s.flip(model, profile{replicas: 8})
		for ctx.Err() == nil && s.paced.Load() < round*perRound {
			nap(ctx, 5*time.Millisecond)
		}
		nap(ctx, time.Duration(random.Int64N(int64(40*time.Millisecond))))
		for range random.IntN(6) {
			p := profile{replicas: fewest << random.IntN(3), policy: []sharing.Policy{sharing.Distributed, sharing.Packed, sharing.Spread}[random.IntN(3)]}
			switch unit := random.IntN(s.units); random.IntN(4) {
			case 0:
				p.faulty = []int{unit}
			case 1:
				p.excluded = []int{unit}
			}
			s.flip(model, p)
			nap(ctx, time.Duration(random.Int64N(int64(20*time.Millisecond))))
		}
		s.flip(model, profile{replicas: fewest})
		removed := s.ledger.tally(s.resource(model)).removed
		gone, cancel := context.WithTimeout(ctx, time.Second)
		for gone.Err() == nil && s.ledger.tally(s.resource(model)).removed == removed {
			nap(gone, 2*time.Millisecond)
		}
		cancel()
	}
}

// restarts starts containers again until ctx ends. Whatever the profile does,
// they get what they had.
func (s *storm) restarts(ctx context.Context, random *rand.Rand) {
	for ctx.Err() == nil {
		if running := s.pods.running(); len(running) > 0 {
			s.restartContainer(running[random.IntN(len(running))])
		}
		nap(ctx, 5*time.Millisecond)
	}
}

// restartContainer takes turns with admissions: see settle.
func (s *storm) restartContainer(p *pod) {
	s.loop.Lock()
	defer s.loop.Unlock()
	if s.crashed.Load() || !s.pods.isRunning(p) || len(s.granted(p)) == 0 {
		return
	}
	if visible, err := s.startContainer(p); err != nil || !slices.Equal(visible, unitsOf(p)) {
		s.t.Errorf("invariant 5: %s with %v started with %v, %v", p.Name, p.devices, visible, err)
	}
}

// rage runs all of it while more says so, which is asked before each admission
// with the number of pods that were admitted.
func (s *storm) rage(more func(admitted int) bool) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var flipping sync.WaitGroup
	for i, model := range s.models {
		flipping.Go(func() { s.flips(ctx, model, rand.New(rand.NewPCG(3, uint64(i)))) })
	}
	flipping.Go(func() { s.restarts(ctx, rand.New(rand.NewPCG(4, 5))) })
	for !s.t.Failed() && !s.crashed.Load() && more(s.admitted) {
		s.tryPod()
	}
	cancel()
	flipping.Wait()
	s.t.Logf("%+v", s.outcome)
}

// tryPod admits a pod and judges the answer, deletes some, and now and then
// resizes one.
func (s *storm) tryPod() {
	s.remind()
	resource := s.resource(s.models[s.random.IntN(len(s.models))])
	count := 1 + s.random.IntN(5)/4
	claim := s.claim(resource, count)
	s.tried++
	s.paced.Add(1)
	_, err := s.admit(resource, count)
	if err == nil {
		s.admitted++
	} else if !errors.As(err, new(errCrashed)) {
		claim.settle(err)
		pause() // A scheduler sends no pods without pause to a node that is full.
	}

	running := s.pods.running()
	if len(running) == 0 {
		return
	}
	p := running[s.random.IntN(len(running))]
	switch {
	case s.random.IntN(8) == 0:
		s.resized++
		if s.resize(p) != nil {
			s.refusedResize++ // One of its devices is Unhealthy; the pod runs on.
		}
	case len(running) > len(s.models)*s.units*2/3 || s.random.IntN(8) == 0:
		s.delete(p)
	}
}

// nap waits, or less when ctx ends.
func nap(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// total adds up what happened to all resources.
func (s *storm) total() tally {
	var all tally
	for _, model := range s.models {
		one := s.ledger.tally(s.resource(model))
		all.lists += one.lists
		all.connections += one.connections
		all.losses += one.losses
		all.removed += one.removed
		all.returned += one.returned
		all.cycles += one.cycles
	}
	return all
}

// Invariants 1, 5 and 6 with everything at once. Without Next's quiet time,
// without the wait until the kubelet has applied that a device is Unhealthy, or
// with surplus devices removed at once, the kubelet panics or a rule is broken.
func TestStorm(t *testing.T) {
	const admissions, cycles = 2000, 100
	const bound = 8 * time.Minute // It takes ten seconds where nobody else is at work.
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			s := newStorm(newBench(t, policy), 4, 3)
			began := time.Now()
			s.rage(func(admitted int) bool {
				return (admitted < admissions || s.total().cycles < cycles) && time.Since(began) < bound
			})
			all := s.total()
			t.Logf("%s: lists: %+v", time.Since(began), all)
			if all.connections != len(s.models) || all.losses != 0 {
				t.Errorf("invariant 1: %d resources registered %d times, lost %d times", len(s.models), all.connections, all.losses)
			}
			if s.admitted < admissions || all.cycles < cycles {
				t.Errorf("%d pods admitted, %d times devices were removed and came back; want at least %d and %d",
					s.admitted, all.cycles, admissions, cycles)
			}
		})
	}
}
