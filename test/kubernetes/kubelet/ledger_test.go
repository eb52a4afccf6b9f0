package kubelet

import (
	"fmt"
	"slices"
	"sync"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/sharing"
)

// ledger is what one node's kubelets have been told, over their restarts. It
// knows the rules that every list must obey, whoever sends it.
type ledger struct {
	// holds says that a running pod holds the device.
	holds func(resource, id string) bool
	clock func() time.Time

	mu         sync.Mutex
	resources  map[string]*account
	violations []string
}

// account is the history of one resource.
type account struct {
	// beliefs are what the kubelet held true, in order: one for each list,
	// and one with nothing healthy for each loss of the plugin.
	beliefs []belief
	// inForce is the newest one that the device manager has taken in.
	inForce int
	// last is the newest list; seen has every ID that was ever in one.
	last belief
	seen map[string]struct{}
	// told are the devices that are listed Unhealthy, removals those that have
	// left the list, in order.
	told     map[string]telling
	removals []removal
	tally
}

// belief says of each device in a list whether it is Healthy.
type belief map[string]bool

// tally counts what happened to a resource.
type tally struct {
	lists, connections, losses int
	// removed and returned count IDs that left a list and came back into one.
	removed, returned int
	// cycles counts lists with returned IDs after one that removed some.
	cycles int
	// shrunk says that IDs have been removed since the last of these cycles.
	shrunk bool
}

func newLedger(holds func(resource, id string) bool) *ledger {
	return &ledger{holds: holds, clock: time.Now, resources: map[string]*account{}}
}

func (l *ledger) account(resource string) *account {
	if l.resources[resource] == nil {
		l.resources[resource] = &account{beliefs: []belief{{}}, seen: map[string]struct{}{}, told: map[string]telling{}}
	}
	return l.resources[resource]
}

func (l *ledger) connected(resource string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.account(resource).connections++
}

func (l *ledger) disconnected(resource string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.account(resource).lose()
}

// succeeded says that whoever sends the next list cannot know the last one, so
// invariant 6 does not bind it.
func (l *ledger) succeeded(resource string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(resource)
	unknown := belief{}
	for id := range a.last {
		unknown[id] = false
	}
	a.last = unknown
}

// restarted says that a new kubelet knows no plugin.
func (l *ledger) restarted() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, account := range l.resources {
		account.lose()
	}
}

func (a *account) lose() {
	a.losses++
	a.beliefs = append(a.beliefs, belief{})
	a.inForce = len(a.beliefs) - 1
}

// received judges a list that the kubelet is about to take in, and returns its
// place in the history.
func (l *ledger) received(resource string, list *api.ListAndWatchResponse) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(resource)
	next := belief{}
	for _, device := range list.Devices {
		if _, twice := next[device.ID]; twice {
			l.violate("%s lists %s twice", resource, device.ID)
		}
		next[device.ID] = device.Health == api.Healthy
	}
	for id, healthy := range a.last {
		if _, stays := next[id]; stays {
			continue
		}
		a.removed++
		a.shrunk = true
		if healthy { // Also where the plugin was lost in between: Virgate tells every stream.
			l.violate("invariant 6: %s drops %s, Healthy in the list before", resource, id)
		}
		if l.holds(resource, id) {
			l.violate("invariant 5: %s drops %s, which a running pod holds", resource, id)
		}
	}
	back := 0
	for id := range next {
		_, listed := a.last[id]
		if _, seen := a.seen[id]; seen && !listed {
			back++
		}
		a.seen[id] = struct{}{}
	}
	a.returned += back
	if back > 0 && a.shrunk {
		a.cycles++
		a.shrunk = false
	}
	a.lists++
	a.last = next
	a.beliefs = append(a.beliefs, next)
	a.followTellings(l.clock())
	l.checkOneName(resource, next)
	return len(a.beliefs) - 1
}

// checkOneName is invariant 7: where a unit has free Healthy devices in this
// resource, it has none in another, nor under another way of sharing here.
func (l *ledger) checkOneName(resource string, next belief) {
	ways := map[string]bool{}
	for id, healthy := range next {
		if !healthy || l.holds(resource, id) {
			continue
		}
		unit, _, shared := sharing.ParseDeviceID(id)
		if before, known := ways[unit]; known && before != shared {
			l.violate("invariant 7: %s offers %s both shared and alone", resource, unit)
		}
		ways[unit] = shared
	}
	for other, account := range l.resources {
		if other == resource {
			continue
		}
		for id, healthy := range account.beliefs[len(account.beliefs)-1] {
			unit, _, _ := sharing.ParseDeviceID(id)
			if _, offered := ways[unit]; healthy && offered && !l.holds(other, id) {
				l.violate("invariant 7: %s and %s both offer %s", resource, other, unit)
			}
		}
	}
}

func (l *ledger) violate(format string, args ...any) {
	l.violations = append(l.violations, fmt.Sprintf(format, args...))
}

// applied says that the device manager has taken in the belief at this place.
func (l *ledger) applied(resource string, at int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(resource)
	a.inForce = max(a.inForce, at)
}

// now returns the place of the belief that is in force.
func (l *ledger) now(resource string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.account(resource).inForce
}

// since returns every belief that may have been in force since the one at this
// place was.
func (l *ledger) since(resource string, at int) []belief {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.account(resource).beliefs[at:])
}

// tally returns the counts of a resource.
func (l *ledger) tally(resource string) tally {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.account(resource).tally
}

// list returns the newest list.
func (l *ledger) list(resource string) belief {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.account(resource).last
}

// broken returns the rules that lists broke, each as often as it happened.
func (l *ledger) broken() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.violations)
}
