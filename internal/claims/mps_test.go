package claims

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing"
)

// entries are the CDI entries of claims as a disk has them, by claim.
type entries struct {
	written map[string]string
	fail    error
}

func (e *entries) Write(c dra.Claim, units map[string]Unit) error {
	if e.fail == nil {
		e.written[c.UID] = fmt.Sprint(units[c.Results[0].UnitName()].ID)
	}
	return e.fail
}

func (e *entries) Remove(c dra.Claim) error {
	if e.fail == nil {
		delete(e.written, c.UID)
	}
	return e.fail
}

func (e *entries) Keep(all []dra.Claim) error {
	maps.DeleteFunc(e.written, func(uid, _ string) bool {
		return !slices.ContainsFunc(all, func(c dra.Claim) bool { return c.UID == uid })
	})
	return nil
}

func mpsRig(t *testing.T) (*rig, *entries) {
	e := &entries{written: map[string]string{}}
	r := &rig{t: t, store: &store{}, units: []Unit{
		{Name: "gpu-a", ID: "GPU-a", GPU: "GPU-a", Device: "gpu-a-mps4", Shares: 4},
		{Name: "gpu-b", ID: "GPU-b", GPU: "GPU-b", Device: "gpu-b-mps4", Shares: 4},
	}}
	r.startWith(e)
	r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.DRA, "gpu-b": units.DRA}))
	return r, e
}

func (r *rig) startWith(e *entries) {
	r.Table = NewTable(Options{Store: r.store, Driver: driver, Entries: e, Holders: func(context.Context) ([]sharing.Allocation, error) { return r.held, nil }})
	r.SetUnits(r.units)
	if _, err := r.Load(); err != nil && !strings.Contains(err.Error(), "invalid character") {
		r.t.Fatal(err)
	}
}

// TestEntries checks that a claim's CDI entries exist from before it is prepared until it has ended, over
// restarts and disk failures.
func TestEntries(t *testing.T) {
	r, e := mpsRig(t)
	c := claim("1", "gpu-a-mps4")
	e.fail = errors.New("no space left")
	r.prepare(c, "write its CDI entries: no space left")
	if got := r.View().Claims; len(got) != 0 {
		t.Errorf("a claim that was refused has %v", got)
	}
	e.fail = nil
	r.prepare(c, "")
	r.prepare(claim("2", "gpu-b-mps4"), "")
	e.written["of a claim that ended while nobody ran"] = ""
	r.startWith(e)
	if want := map[string]string{"1": "GPU-a", "2": "GPU-b"}; !maps.Equal(e.written, want) {
		t.Errorf("after a restart %v", e.written)
	}
	clear(e.written) // A reboot.
	r.units[0].ID = "GPU-a2"
	r.SetUnits(r.units)
	r.prepare(c, "")
	if e.written["1"] != "GPU-a2" {
		t.Errorf("after a reboot %v", e.written)
	}
	e.fail = errors.New("read-only")
	if err := r.Unprepare(c); err == nil || len(r.View().Claims) != 2 {
		t.Errorf("ended with its entries there: %v", err)
	}
	e.fail = nil
	r.must(r.Unprepare(c))
	r.must(r.Unprepare(c))
	if want := map[string]string{}; !maps.Equal(e.written, want) {
		t.Errorf("ended: %v", e.written)
	}
	// If the table is lost, the owners of the entries are unknown.
	r.prepare(c, "")
	r.store.data = []byte("torn")
	r.startWith(e)
	if len(e.written) != 1 {
		t.Errorf("of a lost table %v", e.written)
	}
}

// TestOneDaemon refuses claims that give one container MPS shares of two units.
func TestOneDaemon(t *testing.T) {
	byName := claim("1", "gpu-a-mps4", "gpu-b-mps4")
	byName.ByName = true
	twice := byName
	twice.Results = slices.Clone(byName.Results)
	twice.Results[1].Request = twice.Results[0].Request
	monitoring := claim("1", "gpu-a-mps4", "gpu-b-mps4")
	monitoring.Results[1].Admin = true
	for name, test := range map[string]struct {
		claim dra.Claim
		want  string
	}{
		"two units":                {claim("1", "gpu-a-mps4", "gpu-b-mps4"), "claim team/claim-1 has shares by MPS of two units, gpu-a-mps4 and gpu-b-mps4"},
		"two shares of one":        {claim("1", "gpu-a-mps4", "gpu-a-mps4"), ""},
		"one beside a time slice":  {claim("1", "gpu-a-mps4", "gpu-b-ts"), ""},
		"by name, two containers":  {byName, ""},
		"by name, one container":   {twice, "of two units"},
		"one to be looked at only": {monitoring, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := mpsRig(t)
			r.prepare(test.claim, test.want)
			if err := r.Prepare(t.Context(), test.claim); err != nil && CauseOf(err) != TooMany {
				t.Errorf("the cause is %s, want %s", CauseOf(err), TooMany)
			}
		})
	}
}

// TestMPSModes prepares units only in modes in which they can be used, and takes the number of shares of a device
// that is no longer offered from its name.
func TestMPSModes(t *testing.T) {
	r, _ := mpsRig(t)
	r.SetModes(func(unit Unit, shares int) string {
		switch {
		case unit.ID == "GPU-a" && shares != 4:
			return "its daemon is there"
		case unit.ID == "GPU-b" && shares > 0:
			return "no daemon"
		}
		return ""
	})
	r.prepare(claim("1", "gpu-a"), "gpu-a is faulty: its daemon is there")
	r.prepare(claim("2", "gpu-a-mps10"), "its daemon is there")
	r.prepare(claim("3", "gpu-b-mps4"), "no daemon")
	r.prepare(claim("4", "gpu-b-ts"), "")
	r.prepare(claim("5", "gpu-a-mps4"), "")
	r.units[0].Device, r.units[0].Shares = "gpu-a-mps10", 10
	r.SetUnits(r.units)
	five := claim("6", "gpu-a-mps4")
	five.Results[0].Shares = 4
	r.prepare(five, "with it 5 shares of gpu-a-mps4 would be given, of 4")
	r.SetModes(func(Unit, int) string { return "it does not answer" })
	if got, _ := r.Devices(); len(got) != 2 || got[0].Reason != "it does not answer" {
		t.Errorf("health %+v", got)
	}
}
