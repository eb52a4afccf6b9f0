package mig_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
)

// uses is a set of partitions, by the order in which a row lists them.
func uses(numbers ...int) uint {
	var set uint
	for _, n := range numbers {
		set |= 1 << n
	}
	return set
}

// brief writes steps as "-1g.5gb@0:1 +2g.10gb@0:2", GPU instances in brackets.
func brief(steps []mig.Step) string {
	var words []string
	for _, s := range steps {
		at := fmt.Sprintf("%s@%s", s.Profile, s.Placement)
		words = append(words, map[mig.Action]string{
			mig.DestroyCompute: "-" + at, mig.DestroyInstance: "-[" + at + "]",
			mig.CreateCompute: "+" + at, mig.CreateInstance: "+[" + at + "]",
			mig.EnableMIG: "on", mig.DisableMIG: "off",
		}[s.Action])
	}
	return strings.Join(words, " ")
}

func TestNewChange(t *testing.T) {
	const seven = "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb@6:1"
	for _, row := range []struct {
		name       string
		gpu        uint16
		have, want string
		busy       uint
		steps      string
		blocked    []string
	}{
		{"nothing to do", a100, "3g.20gb@4:4", "3g.20gb", 0, "", nil},
		{"nothing wanted", a100, "3g.20gb@4:4", "", 0, "-3g.20gb@4:4 -[3g.20gb@4:4]", nil},
		{"one more", a100, "3g.20gb@0:4", "2×3g.20gb", 1, "+[3g.20gb@4:4] +3g.20gb@4:4", nil},
		{"one of seven less", a100, seven, "6×1g.5gb", 0, "-1g.5gb@0:1 -[1g.5gb@0:1]", nil},
		{"the one in use stays, whichever it is", a100, seven, "1g.5gb", uses(2),
			"-1g.5gb@0:1 -1g.5gb@1:1 -1g.5gb@3:1 -1g.5gb@4:1 -1g.5gb@5:1 -1g.5gb@6:1 -[1g.5gb@0:1] -[1g.5gb@1:1] -[1g.5gb@3:1] -[1g.5gb@4:1] -[1g.5gb@5:1] -[1g.5gb@6:1]", nil},
		{"the one in the way moves", a100, "1g.5gb@5:1 1g.5gb@0:1", "2×1g.5gb 3g.20gb", uses(1),
			"-1g.5gb@5:1 -[1g.5gb@5:1] +[1g.5gb@3:1] +1g.5gb@3:1 +[3g.20gb@4:4] +3g.20gb@4:4", nil},
		{"neither has to move", a100, "1g.5gb@5:1 1g.5gb@4:1", "2×1g.5gb 3g.20gb", 0, "+[3g.20gb@0:4] +3g.20gb@0:4", nil},
		{"media extensions pass from one to another", a100, "1g.5gb+me@6:1", "1g.10gb 1g.5gb+me", 0,
			"+[1g.10gb@4:2] +1g.10gb@4:2", nil},

		{"one too many in use", a100, "1g.5gb@0:1 1g.5gb@1:1", "1g.5gb", uses(0, 1), "",
			[]string{"1g.5gb at 0:1 is in use and not part of the layout"}},
		{"in the way of everything", a100, seven, "7g.40gb", uses(2),
			"-1g.5gb@0:1 -1g.5gb@1:1 -1g.5gb@3:1 -1g.5gb@4:1 -1g.5gb@5:1 -1g.5gb@6:1 -[1g.5gb@0:1] -[1g.5gb@1:1] -[1g.5gb@3:1] -[1g.5gb@4:1] -[1g.5gb@5:1] -[1g.5gb@6:1]",
			[]string{"1g.5gb at 2:1 is in use, in the way of 7g.40gb at 0:8"}},
		{"in the way of one, what else fits is made", a100, "1g.5gb@0:1", "4g.20gb 3g.20gb", uses(0), "+[3g.20gb@4:4] +3g.20gb@4:4",
			[]string{"1g.5gb at 0:1 is in use, in the way of 4g.20gb at 0:4"}},
		{"not wanted, and in nobody's way", a100, "1g.5gb@6:1", "1g.10gb", uses(0), "+[1g.10gb@4:2] +1g.10gb@4:2",
			[]string{"1g.5gb at 6:1 is in use and not part of the layout"}},
		{"as few as possible block", a100, "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@4:1", "3g.20gb 2×1g.5gb", uses(0, 1, 2), "",
			[]string{"1g.5gb at 4:1 is in use, in the way of 3g.20gb at 4:4"}},
		{"a free one that must move stays until it can", a100, "2g.10gb@2:2 1g.5gb@0:1 1g.5gb@4:1", "4g.20gb 2g.10gb", uses(1, 2), "",
			[]string{
				"1g.5gb at 0:1 is in use, in the way of 4g.20gb at 0:4",
				"1g.5gb at 4:1 is in use, in the way of 2g.10gb at 4:2",
			}},
		{"no more of them stay than are wanted", a100, "1g.5gb+me@0:1 1g.5gb@1:1 1g.5gb@2:1 3g.20gb@4:4", "4g.20gb 1g.5gb", uses(0, 3),
			"-1g.5gb@1:1 -[1g.5gb@1:1]",
			[]string{
				"1g.5gb+me at 0:1 is in use, in the way of 4g.20gb at 0:4",
				"3g.20gb at 4:4 is in use, in the way of 1g.5gb at 6:1",
			}},
		{"two make room for one", a100, "2g.10gb@2:2 1g.5gb@0:1 3g.20gb@4:4", "4g.20gb 2g.10gb 1g.5gb", uses(2),
			"-1g.5gb@0:1 -2g.10gb@2:2 -[1g.5gb@0:1] -[2g.10gb@2:2] +[4g.20gb@0:4] +4g.20gb@0:4",
			[]string{"3g.20gb at 4:4 is in use, in the way of 2g.10gb at 4:2, 1g.5gb at 6:1"}},
		{"the only set of media engines", rtxPro6000, "1g.24gb+me@0:1", "2g.48gb+me.all", uses(0), "",
			[]string{"1g.24gb+me at 0:1 is in use, in the way of 2g.48gb+me.all at 0:2"}},

		{"a share more in the same instance", a100, "1c.2g.10gb@0:2", "2×1c.2g.10gb", uses(0), "+1c.2g.10gb@0:2", nil},
		{"a share in use takes the slices of two others", a100, "1c.3g.20gb@0:4 2c.3g.20gb@0:4", "3×1c.3g.20gb", uses(1), "",
			[]string{"2c.3g.20gb at 0:4 is in use, in the way of 1c.3g.20gb at 0:4, 1c.3g.20gb at 0:4"}},
		{"a free share makes room for a larger one", a100, "1c.3g.20gb@0:4 1c.3g.20gb@0:4 1g.5gb@5:1", "2×1c.3g.20gb 2×2c.3g.20gb", uses(0, 2),
			"-1c.3g.20gb@0:4 +2c.3g.20gb@0:4",
			[]string{"1g.5gb at 5:1 is in use, in the way of 1c.3g.20gb at 4:4, 2c.3g.20gb at 4:4"}},
		{"shares stay together, though others lie better", a100, "1c.2g.10gb@0:2 1c.2g.10gb@2:2 1c.2g.10gb@2:2", "2×1c.2g.10gb", 0,
			"-1c.2g.10gb@0:2 -[2g.10gb@0:2]", nil},
		{"shares become a whole, in the same instance", a100, "1c.2g.10gb@2:2 1c.2g.10gb@2:2", "2g.10gb", 0,
			"-1c.2g.10gb@2:2 -1c.2g.10gb@2:2 +2g.10gb@2:2", nil},
		{"a share in use keeps its instance from that", a100, "1c.3g.20gb@0:4 2c.3g.20gb@0:4", "2×3g.20gb", uses(1),
			"-1c.3g.20gb@0:4 +[3g.20gb@4:4] +3g.20gb@4:4", []string{"2c.3g.20gb at 0:4 is in use, in the way of 3g.20gb at 0:4"}},
		{"shares gather where one is in use", a100, "1c.2g.10gb@0:2 1c.2g.10gb@2:2 1c.2g.10gb@2:2", "2×1c.2g.10gb 2g.10gb 3g.20gb", uses(2),
			"-1c.2g.10gb@0:2 +2g.10gb@0:2 +[3g.20gb@4:4] +3g.20gb@4:4", nil},

		{"whatever nobody has listed goes", a100, "1g.5gb+new@0:1 1g.5gb@1:1", "1g.5gb", 0, "-1g.5gb+new@0:1 -[1g.5gb+new@0:1]", nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			b := listedGPU(t, row.gpu, placed(t, row.have))
			b.setBusy(row.busy)
			change, err := mig.NewChange(b.geometry, true, b.instances, layout(t, row.want))
			if err != nil {
				t.Fatal(err)
			}
			var blocked []string
			for _, b := range change.Blocked {
				blocked = append(blocked, b.String())
			}
			if diff := cmp.Diff(row.steps, brief(change.Steps)); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(row.blocked, blocked); diff != "" {
				t.Errorf("blocked (-want +got):\n%s", diff)
			}
		})
	}
}

// listedGPU has the partitions as a driver would list them, whatever the geometry knows.
func listedGPU(t *testing.T, id uint16, partitions []mig.Partition) *gpuModel {
	t.Helper()
	b := &gpuModel{geometry: geometry(t, id), mode: true}
	for _, p := range partitions {
		i := b.at(p.Placement)
		if i < 0 {
			i = len(b.instances)
			b.instances = append(b.instances, mig.Instance{GI: i + 1, Profile: p.Profile.Instance(), Placement: p.Placement})
		}
		if err := b.createCompute(&b.instances[i], p.Profile.Compute); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

func TestNewChangeMode(t *testing.T) {
	g := geometry(t, a100)
	off := mig.Layout{}
	for _, row := range []struct {
		name       string
		mode       bool
		have       string
		busy       uint
		want       mig.Layout
		steps      string
		blocked    int
		kept, gone int
	}{
		{"off stays off", false, "", 0, off, "", 0, 0, 0},
		{"on stays on", true, "", 0, mig.Layout{MIG: true}, "", 0, 0, 0},
		{"on", false, "", 0, layout(t, "7g.40gb"), "on +[7g.40gb@0:8] +7g.40gb@0:8", 0, 0, 0},
		{"on without partitions", false, "", 0, mig.Layout{MIG: true}, "on", 0, 0, 0},
		{"off, empty", true, "", 0, off, "off", 0, 0, 0},
		{"off, all free", true, "1g.5gb@0:1 1c.2g.10gb@2:2 1c.2g.10gb@2:2", 0, off,
			"-1g.5gb@0:1 -1c.2g.10gb@2:2 -1c.2g.10gb@2:2 -[1g.5gb@0:1] -[2g.10gb@2:2] off", 0, 0, 3},
		{"off, some in use", true, "1g.5gb@0:1 1c.2g.10gb@2:2 1c.2g.10gb@2:2", uses(2), off,
			"-1g.5gb@0:1 -1c.2g.10gb@2:2 -[1g.5gb@0:1]", 1, 1, 2},
	} {
		t.Run(row.name, func(t *testing.T) {
			b := newGPUModel(t, g, placed(t, row.have))
			b.mode = row.mode
			b.setBusy(row.busy)
			change, err := mig.NewChange(g, row.mode, b.instances, row.want)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(row.steps, brief(change.Steps)); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
			if len(change.Blocked) != row.blocked || len(change.Kept) != row.kept || len(change.Doomed) != row.gone {
				t.Errorf("%d block, %d are kept and %d go", len(change.Blocked), len(change.Kept), len(change.Doomed))
			}
			checkNewChange(t, b, row.want)
		})
	}
}

// An instance without partitions is in the way like any other, and as good as a new one if it fits.
func TestNewChangeEmptyInstance(t *testing.T) {
	for _, row := range []struct{ name, empty, want, steps string }{
		{"taken", "3g.20gb@0:4", "3g.20gb", "+3g.20gb@0:4"},
		{"taken by a share", "3g.20gb@0:4", "1c.3g.20gb", "+1c.3g.20gb@0:4"},
		{"cleared", "3g.20gb@0:4", "7g.40gb", "-[3g.20gb@0:4] +[7g.40gb@0:8] +7g.40gb@0:8"},
		{"cleared, though in nobody's way", "3g.20gb@0:4", "2g.10gb", "-[3g.20gb@0:4] +[2g.10gb@0:2] +2g.10gb@0:2"},
	} {
		t.Run(row.name, func(t *testing.T) {
			b := newGPUModel(t, geometry(t, a100), placed(t, row.empty))
			b.instances[0].Computes = nil
			change := checkNewChange(t, b, layout(t, row.want))
			if diff := cmp.Diff(row.steps, brief(change.Steps)); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
		})
	}
}

func TestNewChangeRefuses(t *testing.T) {
	g := geometry(t, a100)
	instance := func(text string, computes ...mig.Compute) mig.Instance {
		p := placed(t, text)[0]
		return mig.Instance{GI: 1, Profile: p.Profile, Placement: p.Placement, Computes: computes}
	}
	for _, row := range []struct {
		name     string
		geometry mig.Geometry
		mode     bool
		have     []mig.Instance
		want     mig.Layout
		because  error
		text     string
	}{
		{"no room on any GPU", g, true, nil, layout(t, "7g.40gb 1g.5gb"), mig.ErrNoRoom, "no room"},
		{"unknown profile", g, true, nil, layout(t, "1g.6gb"), mig.ErrUnknownProfile, "1g.6gb"},
		{"no MIG", mig.Geometry{}, false, nil, mig.Layout{MIG: true}, mig.ErrNoMIG, "the GPU has no MIG"},
		{"partitions with MIG off", g, false, []mig.Instance{instance("1g.5gb@0:1")}, layout(t, "1g.5gb"), nil, "MIG off has GPU instances"},
		{"overlap", g, true, []mig.Instance{instance("3g.20gb@0:4"), instance("1g.5gb@2:1")}, layout(t, "1g.5gb"), nil, "overlaps"},
		{"twice the same", g, true, []mig.Instance{instance("3g.20gb@0:4"), instance("3g.20gb@0:4")}, layout(t, "1g.5gb"), nil, "overlaps"},
		{"outside", g, true, []mig.Instance{instance("3g.20gb@6:4")}, layout(t, "1g.5gb"), nil, "outside"},
		{"too many shares", g, true, []mig.Instance{instance("1g.5gb@0:1", mig.Compute{Slices: 1}, mig.Compute{Slices: 1})}, layout(t, "1g.5gb"), nil, "does not fit its 1 slices"},
		{"a share of nothing", g, true, []mig.Instance{instance("1g.5gb@0:1", mig.Compute{})}, layout(t, "1g.5gb"), nil, "does not fit"},
	} {
		t.Run(row.name, func(t *testing.T) {
			change, err := mig.NewChange(row.geometry, row.mode, row.have, row.want)
			if err == nil || !strings.Contains(err.Error(), row.text) || row.because != nil && !errors.Is(err, row.because) {
				t.Errorf("error %v, want %q", err, row.text)
			}
			if diff := cmp.Diff(mig.Change{}, change); diff != "" {
				t.Errorf("a change beside the error:\n%s", diff)
			}
		})
	}
}

func TestNewChangeDoesNotTouchItsArguments(t *testing.T) {
	b := newGPUModel(t, geometry(t, a100), placed(t, "1g.5gb@6:1 1c.3g.20gb@0:4 2c.3g.20gb@0:4"))
	b.instances[1].Computes[0], b.instances[1].Computes[1] = b.instances[1].Computes[1], b.instances[1].Computes[0]
	before, want := b.clone(), layout(t, "1c.3g.20gb 2g.10gb")
	first, err := mig.NewChange(b.geometry, true, b.instances, want)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before.instances, b.instances) + cmp.Diff(layout(t, "1c.3g.20gb 2g.10gb"), want) +
		cmp.Diff(geometry(t, a100), b.geometry); diff != "" {
		t.Errorf("an argument changed:\n%s", diff)
	}
	// A driver's order of listing does not matter.
	b.instances[0], b.instances[1] = b.instances[1], b.instances[0]
	second, err := mig.NewChange(b.geometry, true, b.instances, want)
	if diff := cmp.Diff(first, second); diff != "" || err != nil {
		t.Errorf("another order, another change: %v\n%s", err, diff)
	}
}

// TestNewChangeGrowsByWhatIsFree checks that in a GPU instance that stays, only as many partitions are made at
// once as there are slices beside a partition in use that must go.
func TestNewChangeGrowsByWhatIsFree(t *testing.T) {
	whole := mig.Placement{Size: 8}
	part := func(name string) mig.Profile {
		p, err := mig.ParseProfile(name)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	one, two, four := part("1c.7g.40gb"), part("2c.7g.40gb"), part("4c.7g.40gb")
	b := newGPUModel(t, geometry(t, a100), []mig.Partition{{Profile: four, Placement: whole}, {Profile: one, Placement: whole}})
	b.setBusy(0b11)
	change := checkNewChange(t, b, mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: one, Count: 1}, {Profile: two, Count: 3}}})
	if made := creations(change); made != 1 || len(change.Blocked) != 1 {
		t.Errorf("makes %d, want 1: %+v", made, change)
	}
}

// BenchmarkNewChange has the longest searches. Each takes less than a millisecond, so a plan can be made at every
// change.
func BenchmarkNewChange(b *testing.B) {
	g := geometry(b, a100)
	for _, row := range []struct {
		name, have, want string
		busy             uint
	}{
		{"the same", "2g.10gb@0:2 1g.5gb@2:1 1g.5gb@3:1 3g.20gb@4:4", "2×1g.5gb 2g.10gb 3g.20gb", 0},
		{"seven to balanced", "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb@6:1", "2×1g.5gb 2g.10gb 3g.20gb", 0},
		{"seven to four, one in the way", "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb@6:1", "3×1g.5gb 4g.20gb", 1 << 2},
		{"seven in use to the whole", "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb@6:1", "7g.40gb", 1<<7 - 1},
		{"scattered in use", "1g.5gb@0:1 1g.5gb@2:1 1g.5gb@4:1 1g.5gb@6:1", "1g.5gb+me 2×1g.5gb 2×1g.10gb", 1<<4 - 1},
		{"seven shares of one instance", "1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8", "3×1c.7g.40gb 2×2c.7g.40gb", 1 << 1},
		{"six shares of three instances", "1c.2g.10gb@0:2 1c.2g.10gb@0:2 1c.2g.10gb@2:2 1c.2g.10gb@2:2 1c.2g.10gb@4:2 1c.2g.10gb@4:2", "3×1c.2g.10gb 3g.20gb", 1<<1 | 1<<3},
	} {
		gpu := newGPUModel(b, g, placed(b, row.have))
		gpu.setBusy(row.busy)
		want := layout(b, row.want)
		b.Run(row.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := mig.NewChange(g, true, gpu.instances, want); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// FuzzNewChange divides a GPU at random, marks some partitions in use and asks for a random layout, possible or
// not.
func FuzzNewChange(f *testing.F) {
	f.Add(uint16(a100), []byte{0, 1, 2, 3}, []byte{0, 0, 2, 3}, uint8(5))
	f.Add(uint16(a30), []byte{9, 9, 1}, []byte{17, 33}, uint8(0))
	f.Add(uint16(rtxPro6000), []byte{3, 70, 8}, []byte{5, 5}, uint8(3))
	f.Fuzz(func(t *testing.T, id uint16, have, want []byte, busy uint8) {
		g, ok := mig.GeometryOf(id)
		if !ok || len(have) > 16 || len(want) > 16 {
			return
		}
		pick := func(b byte) mig.Profile {
			p := g.Profiles[int(b)%len(g.Profiles)].Profile
			p.Compute = max(1, p.Slices-int(b)/len(g.Profiles)%p.Slices)
			return p
		}
		b := &gpuModel{geometry: g, mode: true}
		for n, choice := range have {
			p := pick(choice)
			shape, _ := g.ProfileInfo(p)
			at := mig.Placement{Start: shape.Starts[n%len(shape.Starts)], Size: shape.Size}
			// A partition that a driver would refuse is left out.
			if b.at(at) < 0 {
				_ = b.make(mig.Step{Action: mig.CreateInstance, Profile: p.Instance(), Placement: at, GI: -1})
			}
			_ = b.make(mig.Step{Action: mig.CreateCompute, Profile: p, Placement: at, GI: -1})
		}
		b.setBusy(uint(busy))
		wanted := mig.Layout{MIG: true}
		for _, choice := range want {
			wanted.Partitions = append(wanted.Partitions, mig.PartitionCount{Profile: pick(choice), Count: 1})
		}
		if _, err := g.Place(wanted, nil); err != nil {
			if change, err := mig.NewChange(g, true, b.instances, wanted); err == nil {
				t.Fatalf("%v is impossible, and becomes %+v", wanted, change)
			}
			return
		}
		checkLeast(t, b, wanted)
	})
}
