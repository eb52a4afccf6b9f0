package sharing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestMPSLimitsNeverExceedTheUnit divides units of many sizes in every way among containers.
func TestMPSLimitsNeverExceedTheUnit(t *testing.T) {
	memories := []uint64{0, 1, 1<<20 - 1, 5 << 20, 16_106_127_360, 42_949_672_960, 85_899_345_920 - 1, 1 << 40}
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same for every run
	for range 20 {
		memories = append(memories, random.Uint64N(1<<39))
	}
	for shares := 1; shares <= MaxMPSClients; shares++ {
		for _, memory := range memories {
			for range 20 {
				threads, pinned := 0, uint64(0)
				for left := shares; left > 0; {
					n := 1 + random.IntN(left)
					left -= n
					limit := NewMPSLimit(n, shares, memory)
					threads, pinned = threads+limit.ThreadPercentage, pinned+limit.PinnedMemory
					if limit.ThreadPercentage < 1 || limit.PinnedMemory%(1<<20) != 0 {
						t.Fatalf("%d of %d of %d bytes: %+v", n, shares, memory, limit)
					}
				}
				if threads > 100 || pinned > memory {
					t.Fatalf("%d shares of %d bytes: together %d%% and %d bytes", shares, memory, threads, pinned)
				}
			}
			if all := NewMPSLimit(shares, shares, memory); all.ThreadPercentage != 100 || all.PinnedMemory != memory>>20<<20 {
				t.Fatalf("all %d shares of %d bytes: %+v", shares, memory, all)
			}
		}
	}
	if got, want := NewMPSLimit(2, 3, 40<<30), (MPSLimit{66, 27306 << 20}); got != want {
		t.Errorf("2 of 3 shares: %+v, want %+v", got, want)
	}
}

func TestMPSPlan(t *testing.T) {
	mps := func(name string, replicas int, several bool) ReplicatedResource {
		return ReplicatedResource{Resource: name, Replicas: replicas, MPS: true, SeveralShares: several}
	}
	gpu := whole(0, a100)
	gpu.Memory, gpu.ComputeCapability = 40<<30, "8.0"
	old, volta := gpu, gpu
	old.ComputeCapability, volta.ComputeCapability = "6.1", "7.0"
	parts := cut(0, oneG(), threeG())
	parts.ComputeCapability, parts.Partitions[0].Memory = "8.0", 5<<30
	for _, test := range []struct {
		name     string
		gpu      GPU
		share    ReplicatedResource
		units    []string
		strategy string
		warning  string
	}{
		{"whole", gpu, mps("nvidia.com/gpu", 3, false), []string{"GPU-00000000-0000-0000-0000-000000000000::0of3 3 {33 14316208128}"}, "mps", ""},
		{"several", gpu, mps("nvidia.com/gpu", 4, true), []string{"GPU-00000000-0000-0000-0000-000000000000::0of4 4 {100 42949672960}"}, "mps", ""},
		{"alone", gpu, mps("nvidia.com/gpu", 1, false), []string{"GPU-00000000-0000-0000-0000-000000000000 1"}, "exclusive", ""},
		{"most", gpu, mps("nvidia.com/gpu", 48, false), []string{"GPU-00000000-0000-0000-0000-000000000000::0of48 48 {2 894435328}"}, "mps", ""},
		{"Volta", volta, mps("nvidia.com/gpu", 48, false), []string{"GPU-00000000-0000-0000-0000-000000000000::0of48 48 {2 894435328}"}, "mps", ""},
		{"old, few", old, mps("nvidia.com/gpu", 16, false), []string{"GPU-00000000-0000-0000-0000-000000000000::0of16 16 {6 2684354560}"}, "mps", ""},
		{"old, many", old, mps("nvidia.com/gpu", 17, false), nil, "", "resources[0].replicas: GPU 0 (GPU-00000000-0000-0000-0000-000000000000) not offered: its MPS server serves 16 processes at most, and 17 shares are wanted"},
		{"old, time-sliced", old, ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 17}, []string{"GPU-00000000-0000-0000-0000-000000000000::0 17"}, "time-slicing", ""},
		{"partition", parts, mps("nvidia.com/mig-1g.5gb", 6, false), []string{"MIG-00000000-0000-0000-0000-000000000000::0of6 6 {16 894435328}"}, "mig+mps", ""},
		{"small partition", parts, mps("nvidia.com/mig-1g.5gb", 7, false), nil, "", "resources[0].replicas: GPU 0 (GPU-00000000-0000-0000-0000-000000000000): partition 0 (MIG-00000000-0000-0000-0000-000000000000) not offered: its MPS server serves 6 processes at most, and 7 shares are wanted"},
	} {
		t.Run(test.name, func(t *testing.T) {
			plan := NewPlan([]GPU{test.gpu}, defaults(test.share))
			var units []string
			strategy := ""
			for _, r := range plan.Resources {
				if r.Name != test.share.Resource {
					continue
				}
				strategy = r.Strategy()
				for _, u := range r.Units {
					text := fmt.Sprintf("%s %d", r.Devices[0].ID, u.Replicas)
					if u.MPS.Shares > 0 {
						text += fmt.Sprintf(" %v", u.MPSCeiling())
					}
					units = append(units, text)
				}
			}
			if diff := cmp.Diff(test.units, units); diff != "" {
				t.Error(diff)
			}
			for _, r := range plan.Summary().Resources {
				if want := plan.Resources[0].Units[0].MPS.Shares > 0 && r.Name == test.share.Resource; want != (r.Share != nil) {
					t.Errorf("summary %+v", r)
				}
			}
			if strategy != test.strategy {
				t.Errorf("strategy %q, want %q", strategy, test.strategy)
			}
			if test.warning != "" && !slices.Contains(plan.Warnings, test.warning) || test.warning == "" && strings.Contains(strings.Join(plan.Warnings, ""), "MPS") {
				t.Errorf("warnings %q, want %q", plan.Warnings, test.warning)
			}
		})
	}
}

// TestMPSDiff checks that a unit switches when its sharing mode or its number of MPS shares changes, but not when
// its time-sliced replicas do.
func TestMPSDiff(t *testing.T) {
	plan := func(replicas int, mps bool) Plan {
		return NewPlan(node(1), defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: replicas, MPS: mps}))
	}
	for _, test := range []struct {
		name     string
		from, to Plan
		kind     ChangeKind
		switches int
	}{
		{"to MPS", plan(4, false), plan(4, true), Regrouped, 1},
		{"from MPS", plan(4, true), plan(4, false), Regrouped, 1},
		{"from alone", plan(1, false), plan(4, true), Grows, 1},
		{"other shares", plan(4, true), plan(8, true), Grows, 1},
		{"other replicas", plan(4, false), plan(8, false), Grows, 0},
	} {
		changes := Diff(test.from, test.to)
		if len(changes) != 1 || changes[0].Kind != test.kind || len(changes[0].Switches) != test.switches {
			t.Errorf("%s: %+v", test.name, changes)
		}
	}
	if changes := Diff(plan(4, true), plan(4, true)); changes != nil {
		t.Errorf("no change: %+v", changes)
	}
}
