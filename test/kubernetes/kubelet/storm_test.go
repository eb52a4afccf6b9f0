package kubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/repeat"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// storm is a node on which everything changes at once: pods come, go, are resized and start their
// containers again, while the profile of each resource changes.
type storm struct {
	*bench
	virgate *virgate
	random  *rand.Rand // of the goroutine that admits
	models  []string
	// units is the number of GPUs of each model.
	units int

	mu       sync.Mutex
	profiles map[string]profile
	// faulted is when a plan last had each unit as faulty.
	faulted map[string]time.Time

	// paced is the number of admissions tried.
	paced atomic.Int64
	outcome
}

// outcome counts the results of the admissions.
type outcome struct{ tried, admitted, rejected, faulty, overtaken, resized, refusedResize int }

// fewest is the smallest number of replicas in a storm's profiles.
const fewest = 2

func newStorm(b *bench, timing plugin.Timing, models, units int) *storm {
	s := &storm{
		bench: b, virgate: b.startVirgate(timing), random: rand.New(rand.NewPCG(1, 2)), units: units,
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
	for unit, health := range plan.Health {
		if !health.Healthy() {
			s.faulted[unit] = time.Now()
		}
	}
	s.virgate.Apply(plan)
}

// perRound is the minimum number of pods between two rounds of flips of a resource, so that a slow disk
// slows both.
const perRound = 60

// flips changes the profile of one model until ctx ends, in rounds: from many replicas, through a burst of
// random ones, to few, until IDs have left the list.
func (s *storm) flips(ctx context.Context, model string, random *rand.Rand) {
	for round := int64(0); ctx.Err() == nil; round++ {
		s.flip(model, profile{replicas: 8})
		for ctx.Err() == nil && s.paced.Load() < round*perRound {
			nap(ctx, 5*time.Millisecond)
		}
		nap(ctx, time.Duration(random.Int64N(int64(40*time.Millisecond))))
		for range random.IntN(6) {
			p := profile{replicas: fewest << random.IntN(3), policy: []sharing.AllocationPolicy{sharing.Distributed, sharing.Packed, sharing.Spread}[random.IntN(3)]}
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
		removed := s.history.counts(s.resource(model)).removed
		gone, cancel := context.WithTimeout(ctx, 10*time.Second)
		for gone.Err() == nil && s.history.counts(s.resource(model)).removed == removed {
			nap(gone, 2*time.Millisecond)
		}
		cancel()
	}
}

// restarts starts containers again until ctx ends. Whatever the profile, they get the same units.
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

// rage runs all of it while more returns true. more is called before each admission with the number of
// admitted pods.
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

// tryPod admits a pod and judges the answer, deletes some, and sometimes resizes one.
func (s *storm) tryPod() {
	s.remind()
	resource := s.resource(s.models[s.random.IntN(len(s.models))])
	count := 1 + s.random.IntN(5)/4
	claim := s.checkAdmission(resource, count)
	s.tried++
	s.paced.Add(1)
	_, err := s.admit(resource, count)
	if err == nil {
		s.admitted++
	} else if !errors.As(err, new(errCrashed)) {
		claim.settle(err)
		pause() // A scheduler does not send pods without pause to a full node.
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

// nap waits for d, or until ctx ends.
func nap(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// total adds up what happened to all resources.
func (s *storm) total() counters {
	var all counters
	for _, model := range s.models {
		one := s.history.counts(s.resource(model))
		all.lists += one.lists
		all.connections += one.connections
		all.losses += one.losses
		all.removed += one.removed
		all.returned += one.returned
		all.cycles += one.cycles
	}
	return all
}

// Invariants 1, 5 and 6 with everything at once. Without Next's removal delay, without the wait until the
// kubelet has applied that a device is Unhealthy, or with immediate removal of surplus devices, the kubelet
// panics or a rule is broken.
func TestStorm(t *testing.T) {
	admissions, cycles := repeat.Times(500, 2000), repeat.Times(25, 100)
	timing := quick()
	// A kubelet that gets no processor reads its lists late. If one of them offers a device after its removal delay
	// has passed, a pod may get the device while it leaves the list.
	timing.RemovalDelay = 2 * time.Second
	for _, policy := range policies() {
		t.Run(policy, func(t *testing.T) {
			s := newStorm(newBench(t, policy), timing, 4, 3)
			began := time.Now()
			s.rage(func(admitted int) bool {
				return admitted < admissions || s.total().cycles < cycles
			})
			all := s.total()
			t.Logf("%s: lists: %+v", since(began), all)
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

// admissionCheck decides whether a rejected pod should have been admitted.
//
// A pod should be admitted when as many free devices as it asked for existed throughout, by either of two
// counts:
//
//   - by the lists: in every list that may have been in force between the start
//     and the end of the admission, that many devices are Healthy and held by
//     no running pod. The kubelet decides on one of these lists.
//   - by the profiles: every profile of a storm gives each GPU at least two
//     devices and keeps at most one GPU of a resource back, so that many are
//     free whichever profile is in force and whichever GPU is kept back. This
//     count does not trust the lists: one that dips between two profiles fails
//     here. It does not hold across the loss of a plugin.
//
// Pods come and go only on the goroutine that admits, so the held devices do not change meanwhile. There
// are two excuses:
//
//   - a refusal that names a unit which a plan of the last second had as faulty:
//     the kubelet chose the device before it heard of the fault, and the plugin
//     is right to refuse.
//   - a refusal that names a device for which the admission was too slow, see
//     listHistory.overtook.
type admissionCheck struct {
	*storm
	resource string
	count    int
	began    time.Time
	ended    time.Time
	at       int
	held     map[string]int // by unit
	holds    map[string]bool
}

func (s *storm) checkAdmission(resource string, count int) admissionCheck {
	c := admissionCheck{
		storm: s, resource: resource, count: count, began: time.Now(), at: s.history.now(resource),
		held: map[string]int{}, holds: map[string]bool{},
	}
	for _, p := range s.pods.running() {
		if p.resource != resource {
			continue
		}
		for _, id := range p.devices {
			unit, _, _ := sharing.ParseDeviceID(id)
			c.held[unit]++
			c.holds[id] = true
		}
	}
	return c
}

// settle fails the test when the rejected pod should have been admitted.
func (c admissionCheck) settle(err error) {
	var answer rejection
	if !errors.As(err, &answer) {
		c.t.Error(err)
		return
	}
	c.ended = time.Now()
	c.rejected++
	if strings.Contains(answer.message, "must not be used") && c.faultExcuses(answer.message) {
		c.faulty++
		return
	}
	if id, unknown := unknownDevice(answer.message, c.resource); unknown && c.awaitRemoval(id) == nil {
		c.overtaken++
		c.t.Logf("overtaken: %v", err)
		return
	}
	if strings.Contains(answer.message, "code = Unavailable") || strings.Contains(answer.message, "code = Canceled") {
		// The plugin has gone, and a call noticed it before the device manager did. If it has not gone,
		// this waits in vain and the failure stands.
		c.awaitLoss()
	}
	byLists, unbroken := c.byLists()
	byProfiles := c.byProfiles()
	if byLists >= c.count || unbroken && byProfiles >= c.count {
		c.t.Errorf("rejected although %d (by lists) and %d (by profiles) of %s were free and %d wanted: %v",
			byLists, byProfiles, c.resource, c.count, err)
	}
}

// awaitLoss waits until the kubelet notices that the plugin is gone.
func (c admissionCheck) awaitLoss() {
	_ = await.Condition(c.t.Context().Done(), func() error {
		if _, unbroken := c.byLists(); unbroken {
			return errors.New("the kubelet has not noticed")
		}
		return nil
	})
}

// unknownDevice returns the device that the plugin says it does not have.
func unknownDevice(message, resource string) (id string, is bool) {
	_, quoted, is := strings.Cut(message, resource+` has no device "`)
	id, _, closed := strings.Cut(quoted, `"`)
	return id, is && closed
}

// awaitRemoval returns nil when there is an excuse for the device. The list without it may take a moment to
// reach the kubelet.
func (c admissionCheck) awaitRemoval(id string) error {
	return await.Condition(c.t.Context().Done(), func() error {
		return c.history.excuse(c.resource, id, c.at, c.ended, quick().RemovalDelay)
	})
}

// byLists returns the least number of free devices; unbroken is false when the plugin was lost meanwhile.
func (c admissionCheck) byLists() (least int, unbroken bool) {
	unbroken = true
	for i, belief := range c.history.since(c.resource, c.at) {
		free := 0
		for id, healthy := range belief {
			if healthy && !c.holds[id] {
				free++
			}
		}
		if i == 0 || free < least {
			least = free
		}
		unbroken = unbroken && len(belief) > 0
	}
	return least, unbroken
}

// byProfiles returns the number of free devices if the GPU with most of them is kept back.
func (c admissionCheck) byProfiles() int {
	sum, most := 0, 0
	for i := range c.units {
		free := max(0, fewest-c.held[gpus("", c.firstUnit()+i, 1)[0].UUID])
		sum += free
		most = max(most, free)
	}
	return sum - most
}

// firstUnit returns the index of the resource's first GPU.
func (c admissionCheck) firstUnit() int {
	for i, model := range c.models {
		if c.storm.resource(model) == c.resource {
			return i * c.units
		}
	}
	return 0
}

func (c admissionCheck) faultExcuses(message string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for unit, at := range c.faulted {
		if strings.Contains(message, unit) && at.After(c.began.Add(-time.Second)) {
			return true
		}
	}
	return false
}

// rejection is why the kubelet did not admit a pod; such a pod is Failed for good.
type rejection struct{ reason, message string }

func (r rejection) Error() string { return r.reason + ": " + r.message }

// admit brings a new pod to the node. The error is a rejection or errCrashed.
func (k *kubelet) admit(resource string, count int) (*pod, error) {
	k.loop.Lock()
	defer k.loop.Unlock()
	p := k.pods.add(resource, count)
	if err := k.consult(p, lifecycle.AddOperation); err != nil {
		k.pods.remove(p)
		return nil, err
	}
	running, err := k.settle(p)
	if err != nil {
		k.pods.remove(p)
	}
	return running, err
}

// settle records what an admitted pod got.
//
// A restarted kubelet may not know it: two writers of the checkpoint can leave the older text. The start of
// the container corrects that.
func (k *kubelet) settle(p *pod) (*pod, error) {
	granted := k.granted(p)
	if len(granted) == 0 {
		if _, err := k.startContainer(p); err != nil {
			return nil, err
		}
		granted = k.granted(p)
	}
	if len(granted) != p.count {
		return nil, fmt.Errorf("%s asked for %d and got %v", p.Name, p.count, granted)
	}
	running := k.pods.run(p, granted)
	k.checkOneMode(running)
	return running, nil
}

// checkOneMode is invariant 7 for pods: no unit is held under two names, or alone by two pods. (The holder
// of a whole unit's device may have a share: see sharing.Use.CanBecome.)
func (k *kubelet) checkOneMode(p *pod) {
	for _, other := range k.pods.running() {
		for _, id := range p.devices {
			unit, _, isShared := sharing.ParseDeviceID(id)
			for _, held := range other.devices {
				heldUnit, _, heldShared := sharing.ParseDeviceID(held)
				if other != p && unit == heldUnit && (p.resource != other.resource || !isShared && !heldShared) {
					k.history.complain("invariant 7: %s has %s of %s while %s has %s of %s", p.Name, id, p.resource, other.Name, held, other.resource)
				}
			}
		}
	}
}

// remind gives devices again to every running pod that the kubelet has forgotten, see settle. A pod for
// which none are left is gone.
func (k *kubelet) remind() {
	k.loop.Lock()
	defer k.loop.Unlock()
	for _, p := range k.pods.running() {
		if k.crashed.Load() || len(k.granted(p)) > 0 {
			continue
		}
		if _, err := k.settle(p); err != nil {
			k.pods.remove(p)
		}
	}
}

// granted returns what the device manager says the pod has.
func (k *kubelet) granted(p *pod) []string {
	k.life.RLock()
	defer k.life.RUnlock()
	return slices.Sorted(maps.Keys(k.manager.GetDevices(string(p.UID), p.container().Name)[p.resource]))
}

// resize asks whether a running pod may be resized in place. A rejection leaves the pod as it is.
func (k *kubelet) resize(p *pod) error {
	k.loop.Lock()
	defer k.loop.Unlock()
	return k.consult(p, lifecycle.ResizeOperation)
}

func (k *kubelet) consult(p *pod, operation lifecycle.Operation) error {
	return k.survive(func() error {
		result := k.topology.Admit(&lifecycle.PodAdmitAttributes{Pod: p.Pod, Operation: operation})
		if !result.Admit {
			return rejection{result.Reason, result.Message}
		}
		return nil
	})
}

// delete ends a pod.
func (k *kubelet) delete(p *pod) {
	k.loop.Lock()
	defer k.loop.Unlock()
	k.pods.remove(p)
}

// readmit admits the running pods again, as a restarted kubelet does when it learns of them. Then the
// kubelet knows that it has learned of all.
func (k *kubelet) readmit() error {
	k.loop.Lock()
	defer k.loop.Unlock()
	for _, p := range k.pods.running() {
		if err := k.consult(p, lifecycle.AddOperation); err != nil {
			return fmt.Errorf("admit the running %s again: %w", p.Name, err)
		}
	}
	k.ready.Store(true)
	return nil
}
