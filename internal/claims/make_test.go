package claims

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
)

// divided is a table whose GPU a can be made into two halves, the whole, or a third part that overlaps both. None
// of them exists yet.
func divided(t *testing.T) *rig {
	r := newRig(t)
	has := map[string]int{"left": 1, "right": 1}
	part := func(unitName string, takes map[string]int) Unit {
		return Unit{Name: unitName, GPU: "GPU-a", Device: unitName, Parent: "gpu-a", Needs: takes, Supply: has}
	}
	r.units = []Unit{
		part("gpu-a", has), part("gpu-a-half-0", map[string]int{"left": 1}), part("gpu-a-half-1", map[string]int{"right": 1}),
		part("gpu-a-most-0", has), {Name: "gpu-b", ID: "GPU-b", GPU: "GPU-b", Device: "gpu-b-ts", Shares: 4},
	}
	r.start()
	return r
}

// makes has each partition exist once it is made.
func (r *rig) makes(made *[]string) func(context.Context, string) error {
	return func(_ context.Context, unitName string) error {
		*made = append(*made, unitName)
		r.be(unitName, "MIG-"+unitName)
		return nil
	}
}

func (r *rig) be(unitName, id string) {
	r.units = slices.Clone(r.units)
	for i := range r.units {
		if r.units[i].Name == unitName {
			r.units[i].ID = id
		}
	}
	r.SetUnits(r.units)
}

// TestPartsAreMade checks that a claim's partition is made once, and only after the table has saved the claim.
func TestPartsAreMade(t *testing.T) {
	r := divided(t)
	var made []string
	r.OnMake(func(ctx context.Context, unitName string) error {
		if held := r.View().HeldUnits(); held[unitName].UID == "" {
			t.Errorf("%s is made without a claim in the table: %v", unitName, held)
		}
		return r.makes(&made)(ctx, unitName)
	})
	r.prepare(claim("1", "gpu-a-half-0", "gpu-b-ts"), "")
	r.prepare(claim("1", "gpu-a-half-0", "gpu-b-ts"), "")
	r.prepare(claim("2", "gpu-a-half-1"), "")
	if want := []string{"gpu-a-half-0", "gpu-a-half-1"}; !slices.Equal(made, want) {
		t.Errorf("made %v, want %v", made, want)
	}
	r.must(r.Unprepare(claim("2")))
	r.prepare(claim("3", "gpu-a-half-1"), "") // It still exists.
	if len(made) != 2 {
		t.Errorf("made %v", made)
	}
	r.be("gpu-a-half-0", "") // As after a reboot.
	r.prepare(claim("1", "gpu-a-half-0", "gpu-b-ts"), "")
	if len(made) != 3 {
		t.Errorf("made %v", made)
	}
}

// TestPartsDoNotOverlap checks that no partition is made that overlaps another claim's.
func TestPartsDoNotOverlap(t *testing.T) {
	for name, test := range map[string]struct {
		before, claim dra.Claim
		want          string
	}{
		"beside":             {claim("1", "gpu-a-half-0"), claim("2", "gpu-a-half-1"), ""},
		"overlapping":        {claim("1", "gpu-a-half-0"), claim("2", "gpu-a-most-0"), "claim team/claim-1 has gpu-a-half-0, beside which the GPU has no room for gpu-a-most-0"},
		"the whole GPU":      {claim("1", "gpu-a-half-0"), claim("2", "gpu-a"), "no room for gpu-a"},
		"of a whole GPU":     {claim("1", "gpu-a"), claim("2", "gpu-a-half-0"), "claim team/claim-1 has gpu-a, beside"},
		"twice in one claim": {claim("1", "gpu-b-ts"), claim("2", "gpu-a-half-0", "gpu-a-most-0"), "no room"},
		"both in one claim":  {claim("1", "gpu-b-ts"), claim("2", "gpu-a-half-0", "gpu-a-half-1"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := divided(t)
			var made []string
			r.OnMake(r.makes(&made))
			r.prepare(test.before, "")
			before := len(made)
			r.prepare(test.claim, test.want)
			if test.want != "" && len(made) != before {
				t.Errorf("made %v", made)
			}
		})
	}
	r := divided(t)
	var made []string
	r.OnMake(r.makes(&made))
	r.prepare(claim("1", "gpu-a-half-0"), "")
	r.units = slices.DeleteFunc(slices.Clone(r.units), func(u Unit) bool { return u.Name == "gpu-a-half-0" })
	r.SetUnits(r.units)
	r.prepare(claim("2", "gpu-a-half-1"), "claim team/claim-1 still has gpu-a-half-0") // Wherever that is.
	if err := r.SetPaths(map[string]units.Path{"gpu-a": units.Plugin}); err == nil || !strings.Contains(err.Error(), "claim-1") {
		t.Errorf("the device plugin got a GPU of which a claim has a part: %v", err)
	}
}

// TestNotMade checks that a claim whose partition cannot be made keeps its place for the next try.
func TestNotMade(t *testing.T) {
	r := divided(t)
	var made []string
	fails := true
	r.OnMake(func(ctx context.Context, unitName string) error {
		if fails {
			return errors.New("no driver")
		}
		return r.makes(&made)(ctx, unitName)
	})
	r.prepare(claim("1", "gpu-a-half-0"), "claim team/claim-1: gpu-a-half-0 is not made: no driver")
	if got := r.View().Refused["1"].Cause; got != NotMade {
		t.Errorf("refused because of %q", got)
	}
	r.prepare(claim("2", "gpu-a"), "claim team/claim-1 has gpu-a-half-0")
	fails = false
	r.prepare(claim("1", "gpu-a-half-0"), "")
	r.units[1].Fault = "XID 79"
	r.be("gpu-a-half-0", "")
	ctx, cancel := context.WithCancel(context.Background())
	r.OnMake(func(ctx context.Context, unitName string) error {
		defer cancel()
		return r.makes(&made)(ctx, unitName)
	})
	if err := r.Prepare(ctx, claim("1", "gpu-a-half-0")); err == nil || !strings.Contains(err.Error(), "cannot be given yet: XID 79") {
		t.Errorf("a partition that was just made is faulty: %v", err)
	}
}

// TestOneAtATime checks that no claim gets a part of a GPU while another part is being made.
func TestOneAtATime(t *testing.T) {
	r := divided(t)
	r.be("gpu-a-half-1", "MIG-1")
	var made []string
	begun, goOn := make(chan struct{}), make(chan struct{})
	r.OnMake(func(ctx context.Context, unitName string) error {
		close(begun)
		<-goOn
		return r.makes(&made)(ctx, unitName)
	})
	ended := make(chan error, 2)
	go func() { ended <- r.Prepare(context.Background(), claim("1", "gpu-a-half-0")) }()
	<-begun
	waits, giveUp := context.WithCancel(context.Background())
	giveUp()
	if err := r.Prepare(waits, claim("2", "gpu-a-half-1")); err == nil || !strings.Contains(err.Error(), "another partition of its GPU is being made") {
		t.Errorf("%v", err)
	}
	if _, has := r.View().HeldUnits()["gpu-a-half-1"]; has {
		t.Error("a claim has a part of a GPU that is being changed")
	}
	r.must(r.Prepare(waits, claim("3", "gpu-b-ts"))) // Of another GPU.
	go func() { ended <- r.Prepare(context.Background(), claim("2", "gpu-a-half-1")) }()
	close(goOn)
	for range 2 {
		r.must(<-ended)
	}
}

// TestEndedWhileMade ends a claim while its partition is being made: it gets nothing, and is not listed as
// waiting.
func TestEndedWhileMade(t *testing.T) {
	for _, outcome := range []error{nil, errors.New("no driver")} {
		r := divided(t)
		var made []string
		begun, goOn := make(chan struct{}), make(chan struct{})
		r.OnMake(func(ctx context.Context, unitName string) error {
			close(begun)
			<-goOn
			return cmp.Or(outcome, r.makes(&made)(ctx, unitName))
		})
		ended := make(chan error, 1)
		go func() { ended <- r.Prepare(context.Background(), claim("1", "gpu-a-half-0")) }()
		<-begun
		r.must(r.Unprepare(claim("1")))
		close(goOn)
		if err := <-ended; err == nil {
			t.Error("a claim that has ended was prepared")
		}
		if view := r.View(); len(view.Refused) != 0 || len(view.Claims) != 0 {
			t.Errorf("outcome %v: %+v", outcome, view)
		}
	}
}
