package drapath

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// TestNextPath checks each path's transitions, also for a unit that is gone.
func TestNextPath(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		path  units.Path
		facts pathFacts
		want  units.Path
	}{
		"the plugin's":                     {units.Plugin, pathFacts{vacated: true, partsLeft: true, unallocated: true}, units.Plugin},
		"wanted":                           {units.Plugin, pathFacts{wanted: true}, units.LeavingPlugin},
		"given to a claim":                 {units.Plugin, pathFacts{late: true}, units.LeavingPlugin},
		"not vacated yet":                  {units.LeavingPlugin, pathFacts{wanted: true, partsLeft: true}, units.LeavingPlugin},
		"a partition is the plugin's":      {units.LeavingPlugin, pathFacts{wanted: true, vacated: true}, units.LeavingPlugin},
		"vacated":                          {units.LeavingPlugin, pathFacts{wanted: true, vacated: true, partsLeft: true}, units.DRA},
		"vacated for a late claim":         {units.LeavingPlugin, pathFacts{late: true, vacated: true, partsLeft: true}, units.LeavingDRA},
		"not wanted any more, or gone":     {units.LeavingPlugin, pathFacts{}, units.Plugin},
		"DRA's":                            {units.DRA, pathFacts{wanted: true, unallocated: true}, units.DRA},
		"not wanted by DRA any more":       {units.DRA, pathFacts{unallocated: true}, units.LeavingDRA},
		"a claim has it":                   {units.LeavingDRA, pathFacts{}, units.LeavingDRA},
		"no claim has it":                  {units.LeavingDRA, pathFacts{unallocated: true}, units.Plugin},
		"no claim has it, and wanted anew": {units.LeavingDRA, pathFacts{wanted: true, unallocated: true}, units.DRA},
	} {
		if got := nextPath(test.path, test.facts); got != test.want {
			t.Errorf("%s: %q goes to %q, want %q", name, test.path, got, test.want)
		}
	}
}

// TestHoldersAreAskedForNowAndThen checks that holders are requested again if the waiting units differ, and
// otherwise once per waitInterval. Each answer wakes the loop that requests them; without the limit, the loop did
// nothing else while a pod kept a unit from DRA.
func TestHoldersAreAskedForNowAndThen(t *testing.T) {
	t.Parallel()
	var p Paths
	now := time.Now()
	for _, step := range []struct {
		after time.Duration
		waits []string
		want  bool
	}{
		{0, nil, false},
		{0, []string{"b", "a"}, true},
		{time.Millisecond, []string{"a", "b"}, false},
		{time.Millisecond, []string{"a"}, true},
		{waitInterval - 1, []string{"a"}, false},
		{1, []string{"a"}, true},
		{time.Millisecond, nil, false},
		{time.Millisecond, []string{"a"}, false},
	} {
		now = now.Add(step.after)
		if got := p.refreshes(step.waits, now); got != step.want {
			t.Errorf("%s later, %v wait: %t, want %t", step.after, step.waits, got, step.want)
		}
	}
}

type memory struct{}

func (memory) Read(string, any) (bool, error)  { return false, nil }
func (memory) WriteOrForget(string, any) error { return nil }

type driver struct{ Driver }

func (driver) State() dra.DriverState { return dra.DriverState{} }

// TestPartitionFollowsItsGPU checks that a partition that was moving to DRA separately, and is made on demand
// again, follows its GPU. It delays no other unit, although a claim has it.
func TestPartitionFollowsItsGPU(t *testing.T) {
	t.Parallel()
	nobody := func(context.Context) ([]sharing.Allocation, error) { return nil, nil }
	table := claims.NewTable(claims.Options{Store: memory{}, Driver: dra.DriverName, Holders: nobody})
	log := slog.New(slog.DiscardHandler)
	p := New(Options{Driver: driver{}, Claims: table}, Deps{
		Plugin: plugin.NewManager(plugin.Options{Logger: log}),
		Held:   nobody,
		Inputs: func() Inputs { return Inputs{Planned: true} },
		Replan: func() {},
		Logger: log,
	})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	p.Load()
	const part = "gpu-a-1g10gb-0"
	all := map[string]decide.Unit{}
	for unitName, unit := range map[string]claims.Unit{
		"gpu-a": {ID: "GPU-a", GPU: "GPU-a", Parent: "gpu-a"},
		part:    {ID: "MIG-0", GPU: "GPU-a", Parent: "gpu-a"},
		"gpu-b": {ID: "GPU-b", GPU: "GPU-b"},
	} {
		unit.Name = unitName
		all[unitName] = decide.Unit{Unit: unit, ForDRA: true}
	}
	p.SetUnits(all)
	must(table.SetPaths(map[string]units.Path{"gpu-a": units.DRA}))
	must(table.Prepare(t.Context(), dra.Claim{UID: "1", Namespace: "ns", Name: "1", Results: []dra.Result{{Request: "r", Device: part}}}))
	must(table.SetPaths(map[string]units.Path{"gpu-a": units.LeavingDRA, part: units.LeavingPlugin}))
	p.follow(t.Context())
	if got := table.View().Paths; got["gpu-a"] != units.DRA || got["gpu-b"] != units.LeavingPlugin {
		t.Errorf("paths %v", got)
	}
}
