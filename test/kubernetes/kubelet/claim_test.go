package kubelet

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// claim decides whether a pod that was rejected had a right to be admitted.
//
// A pod has that right when as many free devices as it asked for were there
// throughout, by either of two counts:
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
// Pods come and go only on the goroutine that admits, so what is held does not
// change meanwhile. There are two excuses:
//
//   - a refusal that names a unit which a plan of the last second had as faulty:
//     the kubelet chose the device before it heard of the fault, and the plugin
//     is right to refuse.
//   - a refusal that names a device which the admission was too slow for, see
//     ledger.overtook.
type claim struct {
	*storm
	resource string
	count    int
	began    time.Time
	ended    time.Time
	at       int
	held     map[string]int // by unit
	holds    map[string]bool
}

func (s *storm) claim(resource string, count int) claim {
	c := claim{
		storm: s, resource: resource, count: count, began: time.Now(), at: s.ledger.now(resource),
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

// settle fails the test when the rejected pod had a right to be admitted.
func (c claim) settle(err error) {
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
	if id, unknown := unknownDevice(answer.message, c.resource); unknown && c.awaitRemoval(id) {
		c.overtaken++
		c.t.Logf("overtaken: %v", err)
		return
	}
	if strings.Contains(answer.message, "code = Unavailable") || strings.Contains(answer.message, "code = Canceled") {
		// The plugin has gone, and a call noticed it before the device manager
		// did. If it has not, this waits in vain and the claim stands.
		c.awaitLoss()
	}
	byLists, unbroken := c.byLists()
	byProfiles := c.byProfiles()
	if byLists >= c.count || unbroken && byProfiles >= c.count {
		c.t.Errorf("rejected although %d (by lists) and %d (by profiles) of %s were free and %d wanted: %v",
			byLists, byProfiles, c.resource, c.count, err)
	}
}

// awaitLoss waits a moment until the kubelet notices that the plugin is gone.
func (c claim) awaitLoss() {
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Second)
	defer cancel()
	for ctx.Err() == nil {
		if _, unbroken := c.byLists(); !unbroken {
			return
		}
		pause()
	}
}

// unknownDevice is the device that the plugin says it does not have.
func unknownDevice(message, resource string) (id string, is bool) {
	_, quoted, is := strings.Cut(message, resource+` has no device "`)
	id, _, closed := strings.Cut(quoted, `"`)
	return id, is && closed
}

// awaitRemoval says that the device overtook the admission. The list without it
// may take a moment to the kubelet.
func (c claim) awaitRemoval(id string) bool {
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Second)
	defer cancel()
	for ctx.Err() == nil {
		if c.ledger.overtook(c.resource, id, c.at, c.ended, quick().Quiet) {
			return true
		}
		pause()
	}
	return false
}

// byLists is the least number of free devices; unbroken is false when the
// plugin was lost meanwhile.
func (c claim) byLists() (least int, unbroken bool) {
	unbroken = true
	for i, belief := range c.ledger.since(c.resource, c.at) {
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

// byProfiles is the number of free devices when the GPU with most of them is
// kept back.
func (c claim) byProfiles() int {
	sum, most := 0, 0
	for i := range c.units {
		free := max(0, fewest-c.held[boards("", c.firstUnit()+i, 1)[0].UUID])
		sum += free
		most = max(most, free)
	}
	return sum - most
}

// firstUnit is the index of the resource's first GPU.
func (c claim) firstUnit() int {
	for i, model := range c.models {
		if c.storm.resource(model) == c.resource {
			return i * c.units
		}
	}
	return 0
}

func (c claim) faultExcuses(message string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for unit, at := range c.faulted {
		if strings.Contains(message, unit) && at.After(c.began.Add(-time.Second)) {
			return true
		}
	}
	return false
}
