package configs

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

func profile(t *testing.T, text string) mig.Profile {
	t.Helper()
	p, err := mig.ParseProfile(text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestParseMIGConfigs(t *testing.T) {
	document := `
version: v1
mig-configs:
  later:
  - device-filter: ["0x20B010DE", "0x20b210de:0x134f10de"]
    devices: [1, 0]
    mig-enabled: true
    mig-devices: {2g.10gb: 1, 1g.5gb+me: 1, 1g.5gb: 3, 3g.20gb: 0}
  - device-filter: "0x233010DE"
    devices: [2]
    mig-enabled: false
    mig-devices: {}
  all-disabled:
  - {devices: all, mig-enabled: false}
  all-enabled:
  - {devices: all, mig-enabled: on, mig-devices: {}}
`
	want := MIGLayouts{
		{Name: "all-disabled", Blocks: []sharing.LayoutBlock{{All: true}}},
		{Name: "all-enabled", Blocks: []sharing.LayoutBlock{{All: true, Layout: mig.Layout{MIG: true}}}},
		{Name: "later", Blocks: []sharing.LayoutBlock{
			{
				Filters: []sharing.GPUFilter{{Device: 0x20B010DE}, {Device: 0x20B210DE, Subsystem: 0x134F10DE}},
				Indexes: []int{1, 0},
				Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{
					{Profile: profile(t, "1g.5gb"), Count: 3}, {Profile: profile(t, "1g.5gb+me"), Count: 1}, {Profile: profile(t, "2g.10gb"), Count: 1},
				}},
			},
			{Filters: []sharing.GPUFilter{{Device: 0x233010DE}}, Indexes: []int{2}},
		}},
	}
	got, err := ParseMIGConfigs("mig.yaml", []byte(document))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, unplaced); diff != "" {
		t.Errorf("layouts (-want +got):\n%s", diff)
	}
}

func TestParseMIGConfigsEmpty(t *testing.T) {
	got, err := ParseMIGConfigs("mig.yaml", nil)
	const want = "mig.yaml:1: version: is required\nmig.yaml:1: mig-configs: is required"
	if got != nil || err == nil || err.Error() != want {
		t.Errorf("got %v and %v, want %s", got, err, want)
	}
}

func TestFormatMIGConfigs(t *testing.T) {
	layouts := MIGLayouts{
		{Name: "a \"name\": odd", Blocks: []sharing.LayoutBlock{{All: true}}},
		{Name: "current", Blocks: []sharing.LayoutBlock{
			{
				Filters: []sharing.GPUFilter{{Device: 0x20B010DE}, {Device: 0x20B210DE, Subsystem: 0x134F10DE}},
				Indexes: []int{0, 3},
				Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{
					{Profile: profile(t, "1g.5gb+me"), Count: 1}, {Profile: profile(t, "1c.2g.10gb"), Count: 4},
				}},
			},
			{Indexes: []int{1}, Layout: mig.Layout{MIG: true}},
		}},
	}
	want := `version: v1
mig-configs:
  "a \"name\": odd":
  - devices: all
    mig-enabled: false
  "current":
  - device-filter: ["0x20B010DE", "0x20B210DE:0x134F10DE"]
    devices: [0, 3]
    mig-enabled: true
    mig-devices: {"1g.5gb+me": 1, "1c.2g.10gb": 4}
  - devices: [1]
    mig-enabled: true
    mig-devices: {}
`
	got, err := FormatMIGConfigs(layouts)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("document (-want +got):\n%s", diff)
	}
	again, err := ParseMIGConfigs("again", []byte(got))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(layouts, again, unplaced); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	if text, err := FormatMIGConfigs(nil); err == nil {
		t.Errorf("nothing is written as %q", text)
	}
}

// Each layout of a mig-parted document fits some GPU, and every GPU named by its filters can get it from scratch.
func TestMIGPartedNames(t *testing.T) {
	layouts, err := ParseMIGConfigs("mig-parted-names.yaml", readCase(t, "mig-parted-names.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	reached := make(map[string]int)
	for device := range uint32(1 << 16) {
		geometry, known := mig.GeometryOf(uint16(device))
		if !known {
			continue
		}
		for index := range 8 {
			gpu := sharing.GPUID{Index: index, Device: device<<16 | 0x10DE}
			for _, layout := range layouts {
				wanted := sharing.MIGConfig{Manage: true, Name: layout.Name, Blocks: layout.Blocks}
				if want, ok, err := wanted.Layout(gpu, geometry); err == nil && ok {
					plan(t, layout.Name, geometry, want)
					reached[layout.Name]++
				} else if named(layout, gpu) {
					t.Errorf("%s is for %04X: %v", layout.Name, device, err)
				}
			}
		}
	}
	for _, layout := range layouts {
		if reached[layout.Name] == 0 {
			t.Errorf("%s is for no GPU", layout.Name)
		}
		if _, err := layouts.resolve(layout.Name); err != nil {
			t.Errorf("%s cannot be named: %v", layout.Name, err)
		}
		// A built-in layout of the same name is the same.
		if strings.HasPrefix(layout.Name, "all-") && !slices.ContainsFunc(mig.KnownGeometries(), func(g mig.Geometry) bool {
			_, err := mig.NamedLayout(layout.Name, g)
			return err == nil
		}) {
			t.Errorf("%s is not built in", layout.Name)
		}
	}
}

// named reports whether a filter of the layout names the GPU.
func named(layout MIGLayout, gpu sharing.GPUID) bool {
	for _, block := range layout.Blocks {
		for _, filter := range block.Filters {
			if filter.Match(gpu) {
				return true
			}
		}
	}
	return false
}

// plan goes from MIG off to the layout.
func plan(t *testing.T, name string, geometry mig.Geometry, want mig.Layout) {
	t.Helper()
	change, err := mig.NewChange(geometry, false, nil, want)
	if err != nil || !change.Complete() {
		t.Errorf("%s: %+v, %v", name, change, err)
	}
	count := 0
	for _, c := range want.Partitions {
		count += c.Count
	}
	if len(change.Result) != count {
		t.Errorf("%s: %d partitions, want %d", name, len(change.Result), count)
	}
}

// TestEmptyDeviceFilter checks that a block without a filter, or with an empty one, applies to all GPUs, and that
// an invalid filter is an error, even beside an empty one.
func TestEmptyDeviceFilter(t *testing.T) {
	for filter, want := range map[string]string{
		`""`: "", `[""]`: "", `["", ""]`: "", "[]": "", "null": "",
		`["", "0x20B010DE"]`: `f:2: mig-configs.a[0].device-filter[0]: expected a device filter such as`,
		`" "`:                `f:2: mig-configs.a[0].device-filter: expected a device filter such as`,
	} {
		layouts, err := ParseMIGConfigs("f", []byte("version: v1\nmig-configs: {a: [{device-filter: "+filter+", devices: all, mig-enabled: false}]}"))
		switch {
		case want != "":
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v, want %q", filter, err, want)
			}
		case err != nil || len(layouts[0].Blocks[0].Filters) > 0:
			t.Errorf("%s: %v, %v", filter, layouts, err)
		}
	}
}

func TestDeviceFilter(t *testing.T) {
	tests := []struct {
		text  string
		want  sharing.GPUFilter
		valid bool
	}{
		{"0x20B010DE", sharing.GPUFilter{Device: 0x20B010DE}, true},
		{"0x20b010de", sharing.GPUFilter{Device: 0x20B010DE}, true},
		{"0x20B010DE:0x134F10DE", sharing.GPUFilter{Device: 0x20B010DE, Subsystem: 0x134F10DE}, true},
		{"", sharing.GPUFilter{}, false},
		{"20B010DE", sharing.GPUFilter{}, false},
		{"0x20B010D", sharing.GPUFilter{}, false},
		{"0x20B010DE0", sharing.GPUFilter{}, false},
		{"0x00000000", sharing.GPUFilter{}, false},
		{"0x20B010DE:", sharing.GPUFilter{}, false},
		{"0x20B010DE:0x00000000", sharing.GPUFilter{}, false},
		{"0x20B010DE:0x134F10DE:0x1", sharing.GPUFilter{}, false},
		{"0x+0B010DE", sharing.GPUFilter{}, false},
		{"0x20B0_0DE", sharing.GPUFilter{}, false},
		{"A100", sharing.GPUFilter{}, false},
	}
	for _, test := range tests {
		got, ok := parseDeviceFilter(test.text)
		if got != test.want || ok != test.valid {
			t.Errorf("parseDeviceFilter(%q) = %v, %t", test.text, got, ok)
		}
	}
}
