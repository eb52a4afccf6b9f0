package sharing

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// question is a random call of Prefer.
type question struct {
	devices []Device
	// units is empty if the hardware is unknown.
	units           []Unit
	available, must []string
	size            int
}

// newQuestion makes a question about a few small units: some devices unhealthy, held or required, some IDs
// unknown. The units are whole GPUs, exclusive or shared, with links or without, or partitions of two GPUs.
func newQuestion(r *rand.Rand) question {
	var q question
	known, gpus, most := r.IntN(4) > 0, r.IntN(3), 1+r.IntN(4)
	for u := range 1 + r.IntN(6) {
		unit := Unit{ID: string(rune('A' + u)), GPU: string(rune('A' + u)), NUMANode: r.IntN(3) - 1}
		if r.IntN(3) < gpus {
			unit.GPU = "GPU-" + string(rune('0'+r.IntN(2)))
		}
		for peer := range u {
			if link := (Link{Peer: string(rune('A' + peer)), NVLinks: r.IntN(3)}); !unit.Partition() && r.IntN(2) == 0 {
				unit.Links = append(unit.Links, link)
			}
		}
		if known && r.IntN(10) > 0 {
			q.units = append(q.units, unit)
		}
		q.addDevices(r, unit.ID, 1+r.IntN(most))
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

func (q *question) addDevices(r *rand.Rand, unit string, replicas int) {
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

// ask asks an index of the question's devices.
func (q question) ask(policy AllocationPolicy) []string {
	return NewDeviceSet(q.devices, q.units, policy).Prefer(q.available, q.must, q.size)
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
	q.units = slices.Clone(q.units)
	r.Shuffle(len(q.units), func(i, j int) { q.units[i], q.units[j] = q.units[j], q.units[i] })
	return q
}

func TestPreferProperties(t *testing.T) {
	for _, policy := range AllocationPolicies() {
		t.Run(string(policy), func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			linked := 0
			for range 3000 {
				q := newQuestion(r)
				got := q.ask(policy)
				checkShape(t, q, got)
				if q.byLinks() {
					linked++
					checkBestLinked(t, q, got)
				} else {
					checkBest(t, q, policy, got)
				}
				if other := q.shuffled(r).ask(policy); !slices.Equal(got, other) {
					t.Errorf("%+v: %q, and shuffled %q", q, got, other)
				}
				if t.Failed() {
					return
				}
			}
			if linked < 300 {
				t.Errorf("only %d questions were about links", linked)
			}
		})
	}
}

// checkShape checks the invariants of all policies.
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
	// Unhealthy and unknown devices are taken only when no other is left.
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
