package nvml

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/virgate/virgate/sharing"
)

// tally counts what happened to the health of all boards.
type tally struct {
	transitions map[sharing.TransitionCount]int
	xids        map[sharing.XIDCount]int
	// fresh are the changes that nobody was told of yet.
	fresh []sharing.HealthChange
}

func newTally() *tally {
	return &tally{transitions: map[sharing.TransitionCount]int{}, xids: map[sharing.XIDCount]int{}}
}

func (t *tally) change(c sharing.HealthChange) {
	t.transitions[sharing.TransitionCount{GPU: c.GPU, From: c.From, To: c.State, Cause: c.Cause}]++
	t.fresh = append(t.fresh, c)
}

// take returns the changes since the last time.
func (t *tally) take() []sharing.HealthChange {
	fresh := t.fresh
	t.fresh = nil
	return fresh
}

func (t *tally) xid(gpu string, code uint64, rules sharing.HealthRules) {
	name := sharing.OtherXID
	if _, known := rules.XIDs[code]; known {
		name = strconv.FormatUint(code, 10)
	}
	t.xids[sharing.XIDCount{GPU: gpu, XID: name, Action: rules.XID(code)}]++
}

// transitionCounts are the counters, sorted.
func (t *tally) transitionCounts() []sharing.TransitionCount {
	var list []sharing.TransitionCount
	for key, count := range t.transitions {
		key.Count = count
		list = append(list, key)
	}
	slices.SortFunc(list, func(a, b sharing.TransitionCount) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To), cmp.Compare(a.Cause, b.Cause))
	})
	return list
}

// xidCounts are the counters, sorted.
func (t *tally) xidCounts() []sharing.XIDCount {
	var list []sharing.XIDCount
	for key, count := range t.xids {
		key.Count = count
		list = append(list, key)
	}
	slices.SortFunc(list, func(a, b sharing.XIDCount) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.XID, b.XID), cmp.Compare(a.Action, b.Action))
	})
	return list
}
