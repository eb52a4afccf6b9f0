package sharing

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
)

const (
	a100ID = 0x20B010DE
	a30ID  = 0x20B710DE
	t4ID   = 0x1EB810DE
)

func layoutFor(t *testing.T, words ...string) mig.Layout {
	t.Helper()
	layout := mig.Layout{MIG: true}
	for _, word := range words {
		p, err := mig.ParseProfile(word)
		if err != nil {
			t.Fatal(err)
		}
		layout.Partitions = append(layout.Partitions, mig.PartitionCount{Profile: p, Count: 1})
	}
	return layout
}

func TestRepartitionLayout(t *testing.T) {
	off := mig.Layout{}
	whole, half, small := layoutFor(t, "7g.40gb"), layoutFor(t, "3g.20gb"), layoutFor(t, "1g.6gb")
	only := func(filters ...GPUFilter) []GPUFilter { return filters }
	for _, row := range []struct {
		name   string
		blocks []LayoutBlock
		layout string
		gpu    GPUID
		wanted bool
		want   mig.Layout
		err    string
	}{
		{"all", []LayoutBlock{{All: true, Layout: whole}}, "x", GPUID{3, a100ID, 0}, true, whole, ""},
		{"by index", []LayoutBlock{{Indexes: []int{1, 3}, Layout: whole}}, "x", GPUID{3, a100ID, 0}, true, whole, ""},
		{"another index", []LayoutBlock{{Indexes: []int{1}, Layout: whole}}, "x", GPUID{3, a100ID, 0}, false, off, ""},
		{"by filter", []LayoutBlock{{Filters: only(GPUFilter{a30ID, 0}, GPUFilter{a100ID, 0}), All: true, Layout: whole}}, "x", GPUID{0, a100ID, 7}, true, whole, ""},
		{"another filter", []LayoutBlock{{Filters: only(GPUFilter{a30ID, 0}), All: true, Layout: whole}}, "x", GPUID{0, a100ID, 0}, false, off, ""},
		{"a filter with its subsystem", []LayoutBlock{{Filters: only(GPUFilter{a100ID, 7}), All: true, Layout: whole}}, "x", GPUID{0, a100ID, 7}, true, whole, ""},
		{"another subsystem", []LayoutBlock{{Filters: only(GPUFilter{a100ID, 7}), All: true, Layout: whole}}, "x", GPUID{0, a100ID, 8}, false, off, ""},
		{"a filter and another index", []LayoutBlock{{Filters: only(GPUFilter{a100ID, 0}), Indexes: []int{1}, Layout: whole}}, "x", GPUID{0, a100ID, 0}, false, off, ""},
		{"the last block counts", []LayoutBlock{{All: true, Layout: whole}, {Indexes: []int{3}, Layout: half}, {Indexes: []int{4}}}, "x", GPUID{3, a100ID, 0}, true, half, ""},
		{"off", []LayoutBlock{{All: true}}, "x", GPUID{0, a100ID, 0}, true, off, ""},
		{"all, for a GPU without MIG", []LayoutBlock{{All: true, Layout: whole}}, "x", GPUID{0, t4ID, 0}, false, off, ""},
		{"off, for a GPU without MIG", []LayoutBlock{{Indexes: []int{0}}}, "x", GPUID{0, t4ID, 0}, false, off, ""},
		{"named, for a GPU without MIG", []LayoutBlock{{Indexes: []int{0}, Layout: whole}}, "x", GPUID{0, t4ID, 0}, false, off, `MIG layout "x": 1 × 7g.40gb: the GPU has no MIG`},
		{"a profile of another GPU", []LayoutBlock{{All: true, Layout: small}}, "x", GPUID{2, a100ID, 0}, false, off, `MIG layout "x": 1 × 1g.6gb: the GPU has no such profile (it has 1g.5gb, `},
		{"no room", []LayoutBlock{{All: true, Layout: layoutFor(t, "7g.40gb", "1g.5gb")}}, "x", GPUID{2, a100ID, 0}, false, off, `MIG layout "x": 1 × 7g.40gb, 1 × 1g.5gb: place 1g.5gb beside 7g.40gb: no room on the GPU`},
		{"too many", []LayoutBlock{{All: true, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: half.Partitions[0].Profile, Count: 3}}}}}, "x", GPUID{2, a100ID, 0}, false, off, `MIG layout "x": 3 × 3g.20gb: no room on the GPU, which has 2 at most`},
		{"of another model, impossible here", []LayoutBlock{{All: true, Layout: half}, {Filters: only(GPUFilter{a30ID, 0}), All: true, Layout: small}}, "x", GPUID{2, a100ID, 0}, true, half, ""},
		{"its line", []LayoutBlock{{Layout: half, Source: BlockSource{"f", 3, []int{4}}}, {All: true, Layout: layoutFor(t, "3g.20gb", "1g.6gb"), Source: BlockSource{"f", 7, []int{8, 9}}}}, "x", GPUID{2, a100ID, 0}, false, off, `MIG layout "x": f:9: 1 × 1g.6gb: the GPU`},
		{"its line, together", []LayoutBlock{{All: true, Layout: layoutFor(t, "7g.40gb", "1g.5gb"), Source: BlockSource{"f", 7, []int{8, 9}}}}, "x", GPUID{2, a100ID, 0}, false, off, `MIG layout "x": f:7: 1 × 7g.40gb, 1 × 1g.5gb: place`},
		{"built in", nil, "all-3g.20gb", GPUID{0, a100ID, 0}, true, mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: half.Partitions[0].Profile, Count: 2}}}, ""},
		{"built in, for a GPU without MIG", nil, "all-3g.20gb", GPUID{0, t4ID, 0}, false, off, ""},
		{"built in, for another GPU", nil, "all-3g.20gb", GPUID{0, a30ID, 0}, false, off, `MIG layout "all-3g.20gb": 3g.20gb: the GPU has no such profile`},
		{"built in: off", nil, "all-disabled", GPUID{0, a30ID, 0}, true, off, ""},
		{"no layout", nil, "", GPUID{0, a100ID, 0}, false, off, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			geometry, _ := mig.GeometryOf(uint16(row.gpu.Device >> 16))
			r := MIGConfig{Manage: true, Name: row.layout, Blocks: row.blocks}
			got, wanted, err := r.Layout(row.gpu, geometry)
			if wanted != row.wanted || (err == nil) != (row.err == "") || err != nil && (!strings.Contains(err.Error(), row.err) || strings.Count(err.Error(), "MIG layout") != 1) {
				t.Errorf("wanted is %v and the error %v", wanted, err)
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("layout (-want +got):\n%s", diff)
			}
			r.Manage = false
			if got, wanted, err := r.Layout(row.gpu, geometry); wanted || err != nil || !cmp.Equal(got, off) {
				t.Errorf("without manage: %v, %v, %v", got, wanted, err)
			}
		})
	}
}

func TestRepartitionLayoutErrors(t *testing.T) {
	geometry, _ := mig.GeometryOf(a100ID >> 16)
	_, _, err := MIGConfig{Manage: true, Name: "all-1g.6gb"}.Layout(GPUID{0, a100ID, 0}, geometry)
	if !errors.Is(err, mig.ErrUnknownProfile) {
		t.Errorf("%v is not ErrUnknownProfile", err)
	}
}

func TestRepartitionUnmatched(t *testing.T) {
	gpus := []GPUID{{0, a100ID, 0}, {1, a100ID, 0}, {2, t4ID, 0}}
	r := MIGConfig{Manage: true, Name: "x", Blocks: []LayoutBlock{
		{All: true},
		{Indexes: []int{0, 5}, Source: BlockSource{"f", 7, nil}},
		{Filters: []GPUFilter{{a30ID, 0}}, All: true},
		{Filters: []GPUFilter{{a100ID, 0}}, Indexes: []int{2, 1}, Source: BlockSource{"f", 9, nil}},
	}}
	want := []string{
		`MIG layout "x": f:7: GPU 5 is not on this node or does not pass the filter`,
		`MIG layout "x": f:9: GPU 2 is not on this node or does not pass the filter`,
	}
	if diff := cmp.Diff(want, r.Unmatched(gpus)); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	fleet := MIGConfig{Manage: true, Name: "fleet", Blocks: []LayoutBlock{
		{Filters: []GPUFilter{{a30ID, 0}}, All: true, Source: BlockSource{"f", 3, nil}},
		{Filters: []GPUFilter{{0x233010DE, 0}}, Indexes: []int{0}, Source: BlockSource{"f", 4, nil}},
	}}
	if diff := cmp.Diff([]string{`MIG layout "fleet": f:3: no block is for a GPU of this node`}, fleet.Unmatched(gpus)); diff != "" {
		t.Errorf("a layout for other nodes (-want +got):\n%s", diff)
	}
	r.Manage = false
	if got := r.Unmatched(gpus); got != nil {
		t.Errorf("without manage: %v", got)
	}
}

func TestDividesAll(t *testing.T) {
	a100 := GPU{Index: 0, PCIDevice: a100ID, MIGCapable: true}
	a30 := GPU{Index: 1, PCIDevice: a30ID, MIGCapable: true}
	t4 := GPU{Index: 2, PCIDevice: t4ID}
	divided := mig.Layout{MIG: true}
	all := []LayoutBlock{{All: true, Layout: divided}}
	models := []LayoutBlock{{Filters: []GPUFilter{{a100ID, 0}}, All: true, Layout: divided}, {Filters: []GPUFilter{{0x233010DE, 0}}, All: true, Layout: divided}}
	for _, test := range []struct {
		name   string
		config MIGConfig
		gpus   []GPU
		want   bool
	}{
		{"its model", MIGConfig{Manage: true, Name: "x", Blocks: models}, []GPU{a100}, true},
		{"another model, too", MIGConfig{Manage: true, Name: "x", Blocks: models}, []GPU{a100, a30}, false},
		{"another index", MIGConfig{Manage: true, Name: "x", Blocks: []LayoutBlock{{Indexes: []int{1}, Layout: divided}}}, []GPU{a100}, false},
		{"a later block that leaves it whole", MIGConfig{Manage: true, Name: "x", Blocks: append(all[:1:1], LayoutBlock{Indexes: []int{0}})}, []GPU{a100}, false},
		{"all", MIGConfig{Manage: true, Name: "x", Blocks: all}, []GPU{a100, a30}, true},
		{"all that can", MIGConfig{Manage: true, Name: "x", Blocks: all}, []GPU{a100, t4}, false},
		{"built in", MIGConfig{Manage: true, Name: "all-balanced"}, []GPU{a100, a30}, true},
		{"built in, one without MIG", MIGConfig{Manage: true, Name: "all-balanced"}, []GPU{a100, t4}, false},
		{"disabled", MIGConfig{Manage: true, Name: "all-disabled"}, []GPU{a100}, false},
		{"not managed", MIGConfig{Name: "x", Blocks: all}, []GPU{a100}, false},
		{"no layout", MIGConfig{Manage: true}, []GPU{a100}, false},
		{"no GPU", MIGConfig{Manage: true, Name: "x", Blocks: all}, nil, false},
	} {
		if got := test.config.DividesAll(test.gpus); got != test.want {
			t.Errorf("%s: %v", test.name, got)
		}
	}
}

func TestGPUFilterString(t *testing.T) {
	for want, filter := range map[string]GPUFilter{
		"0x20B010DE":            {a100ID, 0},
		"0x00B010DE:0x134F10DE": {0x00B010DE, 0x134F10DE},
	} {
		if got := filter.String(); got != want {
			t.Errorf("%v is written %s, want %s", filter, got, want)
		}
	}
}
