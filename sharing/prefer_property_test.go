package sharing

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
)

// question is a random call of Prefer.
type question struct {
	devices         []Device
	available, must []string
	size            int
}

// newQuestion makes a question about a few small units: some devices sick, some
// held, some required, some IDs unknown.
func newQuestion(r *rand.Rand) question {
	var q question
	for u := range 1 + r.IntN(4) {
		unit := string(rune('A' + u))
		replicas := 1 + r.IntN(4)
		for replica := range replicas {
			device := Device{ID: unit, Unit: unit, Healthy: r.IntN(6) > 0}
			if replicas > 1 {
				device.ID = NewDeviceID(unit, replica)
			}
			q.devices = append(q.devices, device)
			if r.IntN(5) < 3 {
				q.available = append(q.available, device.ID)
			}
			if r.IntN(8) == 0 {
				q.must = append(q.must, device.ID)
			}
		}
	}
	if r.IntN(4) == 0 {
		q.available = append(q.available, "unknown")
	}
	if r.IntN(8) == 0 {
		q.must = append(q.must, "unknown")
	}
	q.size = len(q.must) + r.IntN(len(q.devices)+2)
	return q
}

// shuffled is the same question in another order and with repetitions.
func (q question) shuffled(r *rand.Rand) question {
	mix := func(ids []string) []string {
		if len(ids) > 0 {
			ids = append(slices.Clone(ids), ids[r.IntN(len(ids))])
		}
		r.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		return ids
	}
	q.available, q.must = mix(q.available), mix(q.must)
	return q
}

func TestPreferProperties(t *testing.T) {
	for _, policy := range []Policy{Distributed, Packed, Spread} {
		t.Run(string(policy), func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			for range 2000 {
				q := newQuestion(r)
				got := NewIndex(q.devices, policy).Prefer(q.available, q.must, q.size)
				checkShape(t, q, got)
				checkBest(t, q, policy, got)
				again := q.shuffled(r)
				if other := NewIndex(q.devices, policy).Prefer(again.available, again.must, q.size); !slices.Equal(got, other) {
					t.Errorf("%+v: %q, and shuffled %q", q, got, other)
				}
				if t.Failed() {
					return
				}
			}
		})
	}
}

// checkShape looks at what holds for every policy.
func checkShape(t *testing.T, q question, got []string) {
	t.Helper()
	choices := slices.Concat(q.available, q.must)
	slices.Sort(choices)
	choices = slices.Compact(choices)
	if want := min(q.size, len(choices)); len(got) != want {
		t.Errorf("%+v: %d IDs in %q, want %d", q, len(got), got, want)
	}
	sorted := slices.Sorted(slices.Values(got))
	if len(slices.Compact(slices.Clone(sorted))) != len(got) {
		t.Errorf("%+v: %q repeats an ID", q, got)
	}
	for _, id := range got {
		if !slices.Contains(choices, id) {
			t.Errorf("%+v: %q was not offered", q, id)
		}
	}
	for _, id := range q.must {
		if !slices.Contains(got, id) {
			t.Errorf("%+v: %q lacks %q", q, got, id)
		}
	}
	// A device that nobody should get is taken only when no other is left.
	rank := func(id string) int {
		at := slices.IndexFunc(q.devices, func(d Device) bool { return d.ID == id })
		switch {
		case slices.Contains(q.must, id):
			return 0
		case at < 0:
			return 3
		case !q.devices[at].Healthy:
			return 2
		default:
			return 1
		}
	}
	worst := 0
	for _, id := range got {
		worst = max(worst, rank(id))
	}
	for _, id := range choices {
		if rank(id) < worst && !slices.Contains(got, id) {
			t.Errorf("%+v: %q passes over %q", q, got, id)
		}
	}
}

// tally counts by unit: devices that pods use, that the container must have,
// that could be picked.
type tally struct{ used, required, left int }

// cost is what a policy minimises, by taking so many devices of each unit.
type cost [2]int

func (p Policy) cost(tallies []tally, picks []int) cost {
	var total cost
	for u, count := range picks {
		unit := tallies[u]
		for already := range count {
			switch p {
			case Packed:
				total[0] -= unit.used + unit.required
			case Spread:
				total[0] += unit.required + already
				total[1] += unit.used
			default:
				total[0] += unit.used + unit.required + already
				total[1] += unit.required + already
			}
		}
	}
	return total
}

// checkBest compares the healthy devices picked with every other way to pick as
// many.
func checkBest(t *testing.T, q question, policy Policy, got []string) {
	t.Helper()
	var tallies []tally
	var picks []int
	wanted := 0
	var last string
	for _, device := range q.devices {
		if device.Unit != last {
			last = device.Unit
			tallies, picks = append(tallies, tally{}), append(picks, 0)
		}
		unit := &tallies[len(tallies)-1]
		switch {
		case slices.Contains(q.must, device.ID):
			unit.required++
		case !device.Healthy:
		case !slices.Contains(q.available, device.ID):
			unit.used++
		default:
			unit.left++
			if slices.Contains(got, device.ID) {
				picks[len(picks)-1]++
				wanted++
			}
		}
	}
	mine := policy.cost(tallies, picks)
	everyWay(tallies, nil, wanted, func(other []int) {
		if c := policy.cost(tallies, other); slices.Compare(c[:], mine[:]) < 0 {
			t.Errorf("%+v: %q takes %v of %+v at cost %v, but %v is %v", q, got, picks, tallies, mine, other, c)
		}
	})
}

// everyWay calls visit with each way to take so many devices of the units.
func everyWay(tallies []tally, sofar []int, wanted int, visit func([]int)) {
	if len(sofar) == len(tallies) {
		if wanted == 0 {
			visit(sofar)
		}
		return
	}
	for count := range 1 + min(wanted, tallies[len(sofar)].left) {
		everyWay(tallies, append(slices.Clone(sofar), count), wanted-count, visit)
	}
}

// A large question, where a wrong heap would show: each pick must be the best
// at its time by a plain search.
func TestPreferPicksTheBestEachTime(t *testing.T) {
	for _, policy := range []Policy{Distributed, Packed, Spread} {
		t.Run(string(policy), func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, 4))
			var devices []Device
			var available []string
			state := make(map[string]*tally)
			for u := range 50 {
				unit := string(rune('A' + u))
				state[unit] = &tally{}
				for replica := range 20 {
					device := Device{ID: NewDeviceID(unit, replica), Unit: unit, Healthy: true}
					devices = append(devices, device)
					if r.IntN(3) == 0 {
						available = append(available, device.ID)
						state[unit].left++
					} else {
						state[unit].used++
					}
				}
			}
			for i, id := range NewIndex(devices, policy).Prefer(available, nil, 200) {
				unit, _, _ := ParseDeviceID(id)
				mine := policy.marginal(*state[unit])
				for name, other := range state {
					c := policy.marginal(*other)
					if other.left > 0 && cmp.Or(slices.Compare(c[:], mine[:]), cmp.Compare(name, unit)) < 0 {
						t.Fatalf("pick %d is of %s at %v, but %s is at %v", i, unit, mine, name, c)
					}
				}
				state[unit].left--
				state[unit].required++
			}
		})
	}
}

// marginal is the cost of one more device of a unit.
func (p Policy) marginal(unit tally) cost {
	c := p.cost([]tally{unit}, []int{1})
	if p == Packed {
		c[1] = -unit.required
	}
	return c
}
