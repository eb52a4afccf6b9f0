package claims

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing"
)

const driver = "gpu.example.com"

// store is a Store whose writes can fail.
type store struct {
	data []byte
	fail error
}

func (s *store) Read(_ string, value any) (bool, error) {
	if s.data == nil {
		return false, nil
	}
	return true, json.Unmarshal(s.data, value)
}

func (s *store) WriteOrForget(_ string, value any) error {
	if s.fail != nil {
		return s.fail
	}
	data, err := json.Marshal(value)
	s.data = data
	return err
}

// rig is a table of two GPUs, a and b. a's two partitions are not offered at first.
type rig struct {
	t       *testing.T
	store   *store
	held    []sharing.Allocation
	unheard error
	units   []Unit
	*Table
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, store: &store{}, units: []Unit{
		{Name: "gpu-a", ID: "GPU-a", GPU: "GPU-a", Device: "gpu-a"},
		{Name: "gpu-b", ID: "GPU-b", GPU: "GPU-b", Device: "gpu-b-ts", Shares: 4},
	}}
	r.start()
	r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.DRA, "gpu-b": units.DRA}))
	return r
}

// start is a start of the program.
func (r *rig) start() {
	r.Table = NewTable(Options{Store: r.store, Driver: driver, Holders: func(context.Context) ([]sharing.Allocation, error) { return r.held, r.unheard }})
	r.SetUnits(r.units)
	if _, err := r.Load(); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// prepare wants an error with this text; empty for success.
func (r *rig) prepare(c dra.Claim, want string) {
	r.t.Helper()
	err := r.Prepare(context.Background(), c)
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		r.t.Errorf("prepare %s: %v, want %q", c, err, want)
	}
	if _, refused := r.View().Refused[c.UID]; refused != (err != nil) {
		r.t.Errorf("%s is among the refused: %t, its error: %v", c, refused, err)
	}
}

func claim(uid string, devices ...string) dra.Claim {
	c := dra.Claim{UID: uid, Namespace: "team", Name: "claim-" + uid}
	for i, device := range devices {
		r := dra.Result{Request: fmt.Sprint("r", i), Device: device}
		if dra.ModeOf(device) != sharing.Exclusive {
			r.ShareID, r.Shares = uid+fmt.Sprint(i), 1
		}
		c.Results = append(c.Results, r)
	}
	return c
}

func TestPrepare(t *testing.T) {
	two := claim("2", "gpu-b-ts")
	two.Results[0].Shares = 2
	admin := claim("9", "gpu-a")
	admin.Results[0].Admin = true
	by := func(unit, name, resource string) []sharing.Allocation {
		return []sharing.Allocation{{Namespace: "ml", Pod: "train", Resource: resource, Devices: []string{unit}, Claim: name}}
	}
	causes := map[string]Cause{
		"more shares than there are": TooMany, "twice": TooMany, "another claim has it": Taken, "shares while it is exclusive": Taken, "exclusive while shares are": Taken,
		"no device": NoDevice, "an unknown device": NoDevice, "a pod of the plugin has it": InUse, "another driver's claim has it": InUse, "the holders are not known": Unread,
		"faulty": Faulty, "the plugin's": InPlugin, "the plugin's still": InPlugin, "a disk that is full": Unwritten,
	}
	for name, test := range map[string]struct {
		before []dra.Claim
		change func(r *rig)
		claim  dra.Claim
		want   string
	}{
		"a whole GPU":                  {claim: claim("1", "gpu-a")},
		"a share":                      {claim: claim("1", "gpu-b-ts")},
		"a share of each":              {claim: claim("1", "gpu-a", "gpu-b-ts")},
		"the last shares":              {before: []dra.Claim{claim("1", "gpu-b-ts"), claim("3", "gpu-b-ts")}, claim: two},
		"the same again":               {before: []dra.Claim{claim("1", "gpu-a")}, claim: claim("1", "gpu-a")},
		"another device than before":   {before: []dra.Claim{claim("1", "gpu-a")}, claim: claim("1", "gpu-b-ts")},
		"for monitoring":               {before: []dra.Claim{claim("1", "gpu-a")}, claim: admin},
		"beside monitoring":            {before: []dra.Claim{admin}, claim: claim("1", "gpu-a")},
		"its own pod is no other":      {change: func(r *rig) { r.held = by("GPU-a", "claim-1", driver) }, claim: claim("1", "gpu-a")},
		"more shares than there are":   {before: []dra.Claim{claim("1", "gpu-b-ts"), claim("3", "gpu-b-ts"), claim("4", "gpu-b-ts")}, claim: two, want: "with it 5 shares of gpu-b-ts would be given, of 4"},
		"another claim has it":         {before: []dra.Claim{claim("1", "gpu-a")}, claim: claim("2", "gpu-a"), want: "claim team/claim-1 still has gpu-a"},
		"shares while it is exclusive": {before: []dra.Claim{claim("1", "gpu-a")}, claim: claim("2", "gpu-a-ts"), want: "claim team/claim-1 still has gpu-a"},
		"exclusive while shares are":   {before: []dra.Claim{claim("1", "gpu-b-ts")}, claim: claim("2", "gpu-b"), want: "claim team/claim-1 still has gpu-b-ts"},
		"twice":                        {claim: claim("1", "gpu-a", "gpu-a"), want: "has gpu-a twice"},
		"no device":                    {claim: claim("1"), want: "no device of this driver"},
		"an unknown device":            {claim: claim("1", "gpu-c"), want: "the node has no gpu-c now"},
		"a pod of the plugin has it":   {change: func(r *rig) { r.held = by("GPU-a", "", "nvidia.com/gpu") }, claim: claim("1", "gpu-a"), want: "ml/train still has gpu-a"},
		"another driver's claim has it": {
			change: func(r *rig) { r.held = by("GPU-a", "claim-1", "gpu.nvidia.com") }, claim: claim("1", "gpu-a"), want: "ml/train by the claim claim-1 of gpu.nvidia.com still has gpu-a",
		},
		"the holders are not known": {change: func(r *rig) { r.unheard = errors.New("no kubelet") }, claim: claim("1", "gpu-a"), want: "who has the node's devices cannot be read: no kubelet"},
		"faulty":                    {change: func(r *rig) { r.units[0].Fault = "XID 79" }, claim: claim("1", "gpu-a"), want: "gpu-a is faulty: XID 79"},
		"the plugin's":              {change: func(r *rig) { r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.Plugin})) }, claim: claim("1", "gpu-a"), want: "offered by the device plugin"},
		"the plugin's still":        {change: func(r *rig) { r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.LeavingPlugin})) }, claim: claim("1", "gpu-a"), want: "offered by the device plugin"},
		"given away before it left": {change: func(r *rig) { r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.LeavingDRA})) }, claim: claim("1", "gpu-a")},
		"given away in another way": {change: func(r *rig) { r.units[0].Device, r.units[0].Shares = "gpu-a-ts", 2 }, claim: claim("1", "gpu-a")},
		"a disk that is full":       {change: func(r *rig) { r.store.fail = errors.New("no space left") }, claim: claim("1", "gpu-a"), want: "keep the claims for a restart: no space left"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			for _, c := range test.before {
				r.prepare(c, "")
			}
			if test.change != nil {
				test.change(r)
				r.SetUnits(r.units)
			}
			r.prepare(test.claim, test.want)
			if got := r.View().Refused[test.claim.UID].Cause; got != causes[name] {
				t.Errorf("refused because of %q, want %q", got, causes[name])
			}
			r.store.fail = nil
			want := r.View().Claims
			r.start()
			if got := r.View().Claims; !slices.EqualFunc(got, want, func(a, b dra.Claim) bool { return a.UID == b.UID }) {
				t.Errorf("after a restart %v, want %v", got, want)
			}
		})
	}
}

// TestPreparedStays checks that a running pod's claim is prepared again whatever happens to its device, as the
// kubelet asks after each of its starts.
func TestPreparedStays(t *testing.T) {
	r := newRig(t)
	c := claim("1", "gpu-a")
	r.prepare(c, "")
	r.units[0].Fault = "XID 79"
	r.SetUnits(r.units)
	r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.LeavingDRA}))
	r.prepare(c, "")
	if err := r.SetPaths(map[string]units.Path{"gpu-a": units.Plugin}); err == nil {
		t.Error("the device plugin got a unit that a claim has")
	}
	if got, _ := r.Devices(); len(got) != 1 || got[0].Healthy || got[0].Reason != "XID 79" {
		t.Errorf("health %+v", got)
	}
	r.must(r.Unprepare(c))
	r.must(r.Unprepare(c))
	r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.Plugin}))
}

// TestPartsOfAnother checks that a GPU that was moving to DRA returns to the device plugin, even if a claim has one
// of its partitions, which is on DRA separately.
func TestPartsOfAnother(t *testing.T) {
	r := newRig(t)
	r.units = append(r.units, Unit{Name: "gpu-a-1g10gb-0", ID: "MIG-0", GPU: "GPU-a", Device: "gpu-a-1g10gb-0"})
	r.SetUnits(r.units)
	r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.LeavingPlugin, "gpu-a-1g10gb-0": units.DRA}))
	r.prepare(claim("1", "gpu-a-1g10gb-0"), "")
	r.must(r.SetPaths(map[string]units.Path{"gpu-a": units.Plugin}))
	if got := r.View().Paths["gpu-a"]; got != units.Plugin {
		t.Errorf("gpu-a is on %q", got)
	}
}

// TestRefusedCounts checks that a refused claim's devices count as held until it ends, as the scheduler counts
// them.
func TestRefusedCounts(t *testing.T) {
	r := newRig(t)
	r.prepare(claim("1", "gpu-a"), "")
	r.prepare(claim("2", "gpu-a-ts"), "still has")
	if held := r.View().Held(); !slices.Equal(held, []string{"gpu-a", "gpu-a-ts"}) {
		t.Errorf("held %v", held)
	}
	r.must(r.Unprepare(claim("2")))
	if held := r.View().Held(); !slices.Equal(held, []string{"gpu-a"}) {
		t.Errorf("held %v", held)
	}
}

// TestLostTable checks that devices that pods hold by claims stay theirs if the file is lost.
func TestLostTable(t *testing.T) {
	r := newRig(t)
	c := claim("1", "gpu-b-ts")
	r.prepare(c, "")
	r.store.data = []byte("torn")
	r.Table = NewTable(Options{Store: r.store, Driver: driver, Holders: func(context.Context) ([]sharing.Allocation, error) { return r.held, nil }})
	r.SetUnits(r.units)
	if known, err := r.Load(); known || err == nil {
		t.Fatalf("known %t, %v", known, err)
	}
	r.held = []sharing.Allocation{{Namespace: "team", Pod: "p", Resource: driver, Claim: "claim-1", Devices: []string{"GPU-b"}}}
	r.must(r.Adopt(r.held))
	view := r.View()
	if view.Paths["gpu-b"] != units.LeavingDRA || !slices.Equal(view.Held(), []string{"gpu-b-ts"}) {
		t.Errorf("%+v", view)
	}
	if err := r.SetPaths(map[string]units.Path{"gpu-b": units.Plugin}); err == nil {
		t.Error("the device plugin got a unit that a claim has")
	}
	r.prepare(c, "") // As after a start of the kubelet.
	if got := r.View().Claims; len(got) != 1 || got[0].UID != "1" {
		t.Errorf("claims %+v", got)
	}
	r.must(r.Adopt(r.held))
	if got := r.View().Claims; len(got) != 1 {
		t.Errorf("claims %+v", got)
	}
	r.must(r.Unprepare(c))
	r.must(r.SetPaths(map[string]units.Path{"gpu-b": units.Plugin}))
}

func TestNotServing(t *testing.T) {
	table := NewTable(Options{Store: &store{}, Holders: func(context.Context) ([]sharing.Allocation, error) { return nil, nil }})
	if err := table.Prepare(context.Background(), claim("1", "gpu-a")); !errors.Is(err, ErrNotServing) {
		t.Error(err)
	}
	table.SetUnits([]Unit{{Name: "gpu-a"}})
	if err := table.Prepare(context.Background(), claim("1", "gpu-a")); !errors.Is(err, ErrNotServing) {
		t.Error(err)
	}
	if err := table.Unprepare(claim("1")); !errors.Is(err, ErrNotServing) || CauseOf(err) != NotServing || CauseOf(errors.New("read claim")) != Unread {
		t.Error(err)
	}
}

// TestRandom has a scheduler with outdated offers, a program that crashes and a disk that fails. No unit ever has
// two incompatible holders.
func TestRandom(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		r := newRig(t)
		known := map[string]dra.Claim{}
		for step := range 120 {
			uid := fmt.Sprint(random.IntN(8))
			r.store.fail = nil
			if random.IntN(5) == 0 {
				r.store.fail = errors.New("disk")
			}
			switch random.IntN(8) {
			case 0, 1, 2:
				c, is := known[uid]
				if !is {
					c = claim(uid, []string{"gpu-a", "gpu-a-ts", "gpu-b", "gpu-b-ts"}[random.IntN(4)])
				}
				if r.Prepare(context.Background(), c) == nil {
					known[uid] = c
				}
			case 3, 4:
				if r.Unprepare(claim(uid)) == nil {
					delete(known, uid)
				}
			case 5:
				i := random.IntN(2)
				if r.units[i].Device = r.units[i].Name; random.IntN(2) == 0 {
					r.units[i].Device += "-ts"
					r.units[i].Shares = int64(1 + random.IntN(4))
				}
				r.SetUnits(r.units)
			case 6:
				unitName := []string{"gpu-a", "gpu-b"}[random.IntN(2)]
				_ = r.SetPaths(map[string]units.Path{unitName: []units.Path{units.Plugin, units.LeavingPlugin, units.DRA, units.LeavingDRA}[random.IntN(4)]})
			case 7:
				r.start()
			}
			by := map[string][]string{}
			for _, c := range r.View().Claims {
				if _, is := known[c.UID]; !is {
					t.Fatalf("seed %d, step %d: %s has a device and was told that it has none", seed, step, c)
				}
				device := c.Results[0].Device
				by[dra.UnitNameOf(device)] = append(by[dra.UnitNameOf(device)], device)
			}
			if len(r.View().Claims) != len(known) {
				t.Fatalf("seed %d, step %d: %d claims, %d were told that they have a device", seed, step, len(r.View().Claims), len(known))
			}
			for unitName, devices := range by {
				if len(slices.Compact(slices.Clone(devices))) > 1 || len(devices) > 1 && dra.ModeOf(devices[0]) == sharing.Exclusive {
					t.Fatalf("seed %d, step %d: %s is given as %v", seed, step, unitName, devices)
				}
				if r.View().Paths[unitName] == units.Plugin {
					t.Fatalf("seed %d, step %d: %s is the device plugin's and a claim's", seed, step, unitName)
				}
			}
		}
	}
}
