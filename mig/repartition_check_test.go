package mig_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

// checkRepartition asks for wanted, makes the steps one by one on the model and
// holds everything that Repartition promises against it but that it destroys as
// little as possible. It returns the first change; the model is as after it.
func checkRepartition(t *testing.T, b *boardModel, wanted mig.Layout) mig.Change {
	t.Helper()
	before, instances := b.partitions(), len(b.instances)
	change, err := mig.Repartition(b.geometry, b.mode, b.instances, wanted)
	if err != nil {
		t.Fatalf("%v → %v: %v", before, wanted, err)
	}
	fail := func(format string, args ...any) {
		t.Helper()
		t.Errorf("%v → %v: %+v", before, wanted, change)
		t.Fatalf(format, args...)
	}
	for _, s := range change.Steps {
		if err := b.make(s); err != nil {
			fail("%s: %v", s, err)
		}
	}
	after := b.partitions()
	var doomed, kept []string
	for _, p := range before {
		if slices.Contains(after, p) {
			kept = append(kept, p.uuid)
		} else {
			doomed = append(doomed, p.uuid)
			if p.busy {
				fail("%s was in use", p.uuid)
			}
		}
	}
	slices.Sort(kept)
	slices.Sort(doomed)
	if diff := cmp.Diff(doomed, change.Doomed) + cmp.Diff(kept, change.Kept); diff != "" {
		fail("doomed or kept (-want +got):\n%s", diff)
	}
	var result []mig.Placed
	for _, p := range after {
		result = append(result, p.Placed)
	}
	if got, want := multiset(change.Result), multiset(result); got != want || len(change.Result) != len(result) {
		fail("result %s, the board has %s", got, want)
	}
	if change.Complete() {
		if b.has() != text(tallyOf(wanted)) || b.mode != wanted.MIG {
			fail("complete, but the board has %s", b.has())
		}
		for _, i := range b.instances {
			if len(i.Computes) == 0 {
				fail("GPU instance %d is left empty", i.GI)
			}
		}
		// No GPU instance more than the layout needs.
		if again, err := b.geometry.Place(wanted, nil); err != nil || len(change.Steps) > 0 && instances == 0 && len(b.instances) > distinct(again) {
			fail("%d GPU instances, %d would do", len(b.instances), distinct(again))
		}
	}
	for _, blocked := range change.Blocked {
		if !slices.Contains(before, state{blocked.Placed, blocked.UUID, true}) {
			fail("blocked by %s, which is not in use", blocked.UUID)
		}
	}
	second, err := mig.Repartition(b.geometry, b.mode, b.instances, wanted)
	if err != nil || len(second.Steps) > 0 || len(second.Doomed) > 0 {
		fail("the second time: %+v, %v", second, err)
	}
	if diff := cmp.Diff(change.Blocked, second.Blocked); diff != "" {
		fail("blocked the second time (-first +second):\n%s", diff)
	}
	return change
}

// finish frees the partitions that block, and holds that the layout is then
// reached without undoing what was made before.
func finish(t *testing.T, b *boardModel, wanted mig.Layout, change mig.Change) {
	t.Helper()
	before := b.partitions()
	made := make(map[string]bool)
	for _, p := range before {
		made[p.uuid] = !slices.Contains(change.Kept, p.uuid)
	}
	var busy uint
	for n, p := range before {
		blocks := slices.ContainsFunc(change.Blocked, func(x mig.Blocked) bool { return x.UUID == p.uuid })
		if p.busy && !blocks {
			busy |= 1 << n
		}
	}
	b.setBusy(busy)
	last := checkRepartition(t, b, wanted)
	if !last.Complete() {
		t.Fatalf("%v → %v is still blocked: %+v", before, wanted, last)
	}
	for _, uuid := range last.Doomed {
		if made[uuid] {
			t.Fatalf("%v → %v destroys %s, which it made itself: %+v", before, wanted, uuid, last)
		}
	}
}

func distinct(list []mig.Placed) int {
	seen := make(map[mig.Placement]bool)
	for _, p := range list {
		seen[p.Placement] = true
	}
	return len(seen)
}

func tallyOf(l mig.Layout) []mig.Count {
	var list []mig.Placed
	for _, c := range l.Partitions {
		for range c.Count {
			list = append(list, mig.Placed{Profile: c.Profile})
		}
	}
	return tally(list)
}

// leastDestroyed tries every subset of the board's partitions and returns the
// most of those in use, and then the most of the free ones, that can stay for
// good.
func leastDestroyed(b *boardModel, wanted mig.Layout) (busy, free int) {
	all := b.partitions()
	for subset := range uint(1) << len(all) {
		left := make(map[mig.Profile]int)
		for _, c := range wanted.Partitions {
			left[c.Profile] += c.Count
		}
		var kept []mig.Placed
		keptBusy, short := 0, false
		for n, p := range all {
			if subset>>n&1 == 0 {
				continue
			}
			kept = append(kept, p.Placed)
			left[p.Profile]--
			short = short || left[p.Profile] < 0
			if p.busy {
				keptBusy++
			}
		}
		keptFree := len(kept) - keptBusy
		if short || keptBusy < busy || keptBusy == busy && keptFree <= free {
			continue
		}
		rest := mig.Layout{MIG: true}
		for p, count := range left {
			rest.Partitions = append(rest.Partitions, mig.Count{Profile: p, Count: count})
		}
		if _, err := b.geometry.Place(rest, kept); err == nil {
			busy, free = keptBusy, keptFree
		}
	}
	return busy, free
}
