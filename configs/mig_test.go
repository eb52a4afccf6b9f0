package configs

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// layoutDocument has a profile that names its own layouts and those of another key, which has mig-parted's own
// document.
const layoutDocument = `
apiVersion: v1
kind: ConfigMap
data:
  inline: |
    mig:
      manage: true
      config: mine
      whenBusy: refuse
      configs:
        mine:
        - {devices: [0], mig-enabled: true, mig-devices: {2g.10gb: 1, 1g.5gb: 2}}
        - {devices: [1], mig-enabled: false}
        all-balanced: [{devices: all, mig-enabled: true, mig-devices: {}}]
  label-only: |
    mig: {manage: true}
  hands-off: |
    mig: {config: theirs}
  zz-layouts: |
    version: v1
    mig-configs:
      theirs: [{device-filter: "0x20B010DE", devices: all, mig-enabled: true, mig-devices: {7g.40gb: 1}}]
      mine: [{devices: all, mig-enabled: false}]
      for-a-new-GPU: [{device-filter: "0x111110DE", devices: all, mig-enabled: true, mig-devices: {9g.9gb: 1}}]
      impossible: [{devices: all, mig-enabled: true, mig-devices: {9g.9gb: 1}}]
`

// unplaced compares blocks without their places.
var unplaced = cmpopts.IgnoreTypes(sharing.BlockSource{})

func layoutsOf(t *testing.T) map[string]Config {
	t.Helper()
	m, err := ParseFile("m", []byte(layoutDocument), nil)
	if err != nil {
		t.Fatal(err)
	}
	byKey := make(map[string]Config)
	for _, e := range m.Entries {
		byKey[e.Name] = e.Config
	}
	return byKey
}

func all(t *testing.T, text string) []sharing.LayoutBlock {
	t.Helper()
	layout := mig.Layout{MIG: true}
	if text != "" {
		layout.Partitions = []mig.PartitionCount{{Profile: profile(t, text), Count: 1}}
	}
	return []sharing.LayoutBlock{{All: true, Layout: layout}}
}

func TestMIGSection(t *testing.T) {
	mine := []sharing.LayoutBlock{
		{Indexes: []int{0}, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{
			{Profile: profile(t, "1g.5gb"), Count: 2}, {Profile: profile(t, "2g.10gb"), Count: 1},
		}}},
		{Indexes: []int{1}},
	}
	theirs := all(t, "7g.40gb")
	theirs[0].Filters = []sharing.GPUFilter{{Device: 0x20B010DE}}
	for key, want := range map[string]sharing.MIGConfig{
		"inline":     {Manage: true, Name: "mine", Blocks: mine, WhenBusy: sharing.RefuseWhenBusy},
		"label-only": {Manage: true, WhenBusy: sharing.WaitWhenBusy},
		"hands-off":  {Name: "theirs", Blocks: theirs, WhenBusy: sharing.WaitWhenBusy},
	} {
		if diff := cmp.Diff(want, layoutsOf(t)[key].Profile.MIG, unplaced); diff != "" {
			t.Errorf("%s (-want +got):\n%s", key, diff)
		}
	}
}

func TestSelectMIG(t *testing.T) {
	off := []sharing.LayoutBlock{{All: true}}
	for _, row := range []struct {
		name, key, layout string
		wantName          string
		want              []sharing.LayoutBlock
		err               string
	}{
		{"the document's own", "inline", "mine", "mine", nil, ""},
		{"another key's", "label-only", "mine", "mine", off, ""},
		{"built in", "label-only", "all-balanced", "all-balanced", nil, ""},
		{"the document's own before what is built in", "inline", "all-balanced", "all-balanced", all(t, ""), ""},
		{"built in for a profile", "label-only", "all-1g.5gb", "all-1g.5gb", nil, ""},
		{"no label", "inline", "", "mine", nil, ""},
		{"without manage", "hands-off", "all-balanced", "theirs", nil, ""},
		{"a wrong name without manage", "hands-off", "nonsense", "theirs", nil, ""},
		{"no such layout", "inline", "nonsense", "mine", nil, `MIG layout "nonsense": no layout has this name; all-disabled, all-enabled, `},
		{"misspelt", "inline", "all-disable", "mine", nil, "did you mean all-disabled?"},
		{"built in for a profile of no known model", "label-only", "all-1g.7gb", "all-1g.7gb", nil, ""},
		{"with a profile of no known model", "label-only", "impossible", "impossible", all(t, "9g.9gb"), ""},
		{"no profile", "label-only", "all-1g.5", "", nil, "no layout has this name; all-disabled"},
	} {
		t.Run(row.name, func(t *testing.T) {
			before := layoutsOf(t)[row.key]
			got, err := before.SelectMIG(row.layout)
			if row.err != "" {
				if err == nil || !strings.Contains(err.Error(), row.err) {
					t.Errorf("error %v, want %q", err, row.err)
				}
			} else if err != nil {
				t.Error(err)
			}
			if got.Profile.MIG.Name != row.wantName {
				t.Errorf("layout %q, want %q", got.Profile.MIG.Name, row.wantName)
			}
			want := row.want
			if row.layout == "" || row.wantName != row.layout || row.name == "the document's own" {
				want = before.Profile.MIG.Blocks
			}
			if diff := cmp.Diff(want, got.Profile.MIG.Blocks, unplaced); diff != "" {
				t.Errorf("blocks (-want +got):\n%s", diff)
			}
		})
	}
	selected, err := layoutsOf(t)["label-only"].SelectMIG("for-a-new-GPU")
	if err != nil || len(selected.Profile.MIG.Blocks) != 1 {
		t.Errorf("a GPU that is not published: %v, %v", selected.Profile.MIG, err)
	}
}

// TestLayoutsOfOtherModels checks that a layout that no known GPU model can have is left to the node's driver: it
// is noted with its line, and the profile stays valid.
func TestLayoutsOfOtherModels(t *testing.T) {
	const layouts = `
  fleet:
  - {device-filter: "0x20B010DE", devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  - device-filter: "0x294110DE"
    devices: all
    mig-enabled: true
    mig-devices:
      1g.23gb: 1
      1g.21gb: 6
  misspelt: [{devices: all, mig-enabled: true, mig-devices: {1g.7gb: 2}}]
  unlike: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 1, 1g.6gb: 1}}]
  many: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 8}}]
  theirs: [{device-filter: "0x20B710DE", devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 1}}]
  new: [{device-filter: ["0x20B710DE", "0x111110DE"], devices: all, mig-enabled: true, mig-devices: {9g.9gb: 1}}]
`
	doubts := map[int]string{
		10: "fleet[1].mig-devices.1g.21gb: no GPU model that Virgate knows and this block chooses can have 6 × 1g.21gb; the driver of each node decides",
		11: "misspelt[0].mig-devices.1g.7gb: no GPU model that Virgate knows and this block chooses can have 2 × 1g.7gb; the driver of each node decides",
		12: "unlike[0].mig-devices: no GPU model that Virgate knows and this block chooses can have 1 × 1g.5gb, 1 × 1g.6gb; the driver of each node decides",
		13: "many[0].mig-devices.1g.5gb: no GPU model that Virgate knows and this block chooses can have 8 × 1g.5gb; the driver of each node decides",
		14: "theirs[0].mig-devices.1g.5gb: no GPU model that Virgate knows and this block chooses can have 1 × 1g.5gb; the driver of each node decides",
	}
	noted := func(config Config) map[int]string {
		found := map[int]string{}
		for _, note := range config.Notes {
			if strings.Contains(note.Message, "model") {
				found[note.Line] = note.Path + ": " + note.Message
			}
		}
		return found
	}
	below := func(section string) map[int]string {
		want := map[int]string{}
		for line, text := range doubts {
			want[line] = section + "." + text
		}
		return want
	}
	profile := "mig:\n  manage: true\n  configs:" + strings.ReplaceAll(strings.TrimRight(layouts, "\n"), "\n", "\n  ") +
		"\n  config: fleet\n  allowed: [all-disabled, many, all-1g.6gb, all-9g.9gb]\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}\n"
	config, err := Parse("p", []byte(profile), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := map[int]string{}
	for line, text := range below("mig.configs") {
		want[line+1] = text
	}
	want[18] = "mig.allowed[3]: no GPU model that Virgate knows has this profile; the driver of each node decides"
	if diff := cmp.Diff(want, noted(config)); diff != "" {
		t.Errorf("the profile's notes (-want +got):\n%s", diff)
	}
	if source := (sharing.BlockSource{File: "p", Line: 6, Lines: []int{11, 10}}); !cmp.Equal(source, config.Profile.MIG.Blocks[1].Source) {
		t.Errorf("source is %+v, want %+v", config.Profile.MIG.Blocks[1].Source, source)
	}
	for _, name := range []string{"many", "misspelt", "all-9g.9gb"} {
		if selected, err := config.SelectMIG(name); err != nil || selected.Profile.MIG.Name != name {
			t.Errorf("%s by label: %v", name, err)
		}
	}
	file, err := ParseFile("l", []byte("version: v1\nmig-configs:"+layouts), nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(below("mig-configs"), noted(file.Config)); diff != "" {
		t.Errorf("notes of mig-parted's document (-want +got):\n%s", diff)
	}
	if wanted, err := file.MIGLayout("", "fleet"); err != nil || wanted.Blocks[1].Source.Line != 5 {
		t.Errorf("mig-parted's: %+v, %v", wanted.Blocks, err)
	}
	manifest := "apiVersion: v1\nkind: ConfigMap\ndata:\n  l: |\n    version: v1\n    mig-configs:" + strings.ReplaceAll(layouts, "\n", "\n    ") +
		"\n  p: |\n    mig: {manage: true, config: theirs}\n"
	file, err = ParseFile("m", []byte(manifest), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := noted(file.Entries[0].Config); len(got) != len(doubts) || got[18] != "mig-configs."+doubts[14] {
		t.Errorf("notes in a ConfigMap: %v", got)
	}
	if source := file.Entries[1].Config.Profile.MIG.Source(); source != "m[data.l]:18" {
		t.Errorf("its layout stands at %s", source)
	}
}

// TestAllowed has the label choose among the layouts that the profile allows.
func TestAllowed(t *testing.T) {
	for _, row := range []struct{ name, mig, layout, err string }{
		{"absent: all", "manage: true", "all-balanced", ""},
		{"in the list", "manage: true, allowed: [all-disabled, all-balanced]", "all-balanced", ""},
		{"not in the list", "manage: true, allowed: [all-disabled]", "all-balanced", `MIG layout "all-balanced": mig.allowed does not have it, only ["all-disabled"]`},
		{"not in the list, and the profile's", "manage: true, config: all-balanced, allowed: [all-disabled]", "all-balanced", "mig.allowed does not have it"},
		{"none", "manage: true, allowed: []", "all-disabled", "mig.allowed does not have it, only []"},
		{"no label", "manage: true, allowed: []", "", ""},
		{"without manage the label means nothing", "allowed: []", "all-disabled", ""},
		{"its own", "manage: true, allowed: [mine], configs: {mine: [{devices: all, mig-enabled: false}]}", "mine", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			config, err := Parse("p", []byte("mig: {"+row.mig+"}"), nil)
			if err != nil {
				t.Fatal(err)
			}
			before := config.SelectedFrom("p", "", nil)
			got, err := before.SelectMIG(row.layout)
			if (err == nil) != (row.err == "") || err != nil && (!errors.Is(err, ErrMIGLayout) || !strings.Contains(err.Error(), row.err)) {
				t.Fatalf("error %v, want %q", err, row.err)
			}
			want := row.layout
			if err != nil || !config.Profile.MIG.Manage || want == "" {
				want = config.Profile.MIG.Name
			}
			if got.Profile.MIG.Name != want {
				t.Errorf("layout %q, want %q", got.Profile.MIG.Name, want)
			}
			// A layout on the command line is not a label.
			if _, err := (File{Config: config, Kind: KindProfile}).MIGLayout("", "all-1g.5gb"); err != nil {
				t.Error(err)
			}
		})
	}
	for text, want := range map[string]string{
		"mig: {allowed: all-balanced}":     "p:1: mig.allowed: expected a list",
		"mig: {allowed: [all-balancd]}":    "p:1: mig.allowed[0]: no layout has this name, did you mean all-balanced?",
		"mig: {allowed: [all-enabled, 3]}": "p:1: mig.allowed[1]: ",
	} {
		if _, err := Parse("p", []byte(text), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", text, err, want)
		}
	}
}

// TestCheckOffered refuses to divide all GPUs if nothing of them would be offered.
func TestCheckOffered(t *testing.T) {
	const mine = ", configs: {mine: [{devices: [0], mig-enabled: true, mig-devices: {}}, {devices: [1], mig-enabled: false}], away: [{devices: all, mig-enabled: false}], one: [{devices: [0], mig-enabled: true, mig-devices: {}}], but: [{devices: all, mig-enabled: true, mig-devices: {}}, {devices: [0], mig-enabled: false}], " +
		"models: [{device-filter: '0x20B010DE', devices: all, mig-enabled: true, mig-devices: {}}, {device-filter: '0x233010DE', devices: all, mig-enabled: true, mig-devices: {}}], all-disabled: [{devices: all, mig-enabled: true, mig-devices: {}}]}"
	for _, row := range []struct {
		name, strategy, mig string
		ok                  bool
	}{
		{"balanced, none", "none", "manage: true, config: all-balanced", false},
		{"balanced, mixed", "mixed", "manage: true, config: all-balanced", true},
		{"balanced, single", "single", "manage: true, config: all-balanced", true},
		{"disabled", "none", "manage: true, config: all-disabled", true},
		{"enabled", "none", "manage: true, config: all-enabled", false},
		{"without manage", "none", "config: all-balanced", true},
		{"for the label", "none", "manage: true", true},
		{"its own on one GPU, the other one whole", "none", "manage: true, config: mine" + mine, true},
		{"its own on one GPU, the others as they are", "none", "manage: true, config: one" + mine, true},
		{"its own on all GPUs but one", "none", "manage: true, config: but" + mine, true},
		{"its own on all of two models, which this node may lack", "none", "manage: true, config: models" + mine, true},
		{"its own, off", "none", "manage: true, config: away" + mine, true},
		{"its own all-disabled that divides", "none", "manage: true, config: all-disabled" + mine, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			document := "mig: {" + row.mig + "}"
			if row.strategy != "none" {
				document += "\nflags: {migStrategy: " + row.strategy + "}"
			}
			config, err := Parse("p", []byte(document), nil)
			if err != nil {
				t.Fatal(err)
			}
			err = config.CheckOffered()
			if (err == nil) != row.ok || err != nil && !errors.Is(err, ErrMIGLayout) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestLayoutsFromElsewhere(t *testing.T) {
	document := []byte("mig: {manage: true, config: theirs}")
	if _, err := Parse("f", document, nil); err == nil || !strings.Contains(err.Error(), "f:1: mig.config: no layout has this name") {
		t.Errorf("alone: %v", err)
	}
	config, err := parseDocument("f", document, func(root value) Config {
		return readProfile(root, nil, MIGLayouts{{Name: "theirs", Blocks: all(t, "1g.5gb")}})
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(all(t, "1g.5gb"), config.Profile.MIG.Blocks); diff != "" {
		t.Errorf("blocks (-want +got):\n%s", diff)
	}
}

func TestMIGNotes(t *testing.T) {
	config, err := Parse("f", []byte("mig:\n  config: all-balanced\n  reset: true\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if !config.Profile.MIG.Reset {
		t.Error("mig.reset is lost")
	}
	var got []string
	for _, note := range config.Notes {
		if strings.HasPrefix(note.Path, "mig") {
			got = append(got, note.Path+": "+note.Message)
		}
	}
	want := []string{
		"mig: Virgate's own: NVIDIA's plugin makes no partitions",
		"mig.config: has no effect without manage: true",
		"mig.reset: has no effect without manage: true",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}

func TestFileMIGLayout(t *testing.T) {
	const layouts = "version: v1\nmig-configs:\n  one: [{devices: all, mig-enabled: false}]\n  two: [{devices: all, mig-enabled: true, mig-devices: {}}]\n"
	indented := "  layouts: |\n    " + strings.ReplaceAll(strings.TrimSpace(layouts), "\n", "\n    ") + "\n"
	const manifest = "apiVersion: v1\nkind: ConfigMap\ndata:\n"
	const profiles = "  a: |\n    mig: {manage: true, config: one, whenBusy: refuse}\n  b: |\n    mig: {config: all-balanced}\n"
	for _, row := range []struct {
		name           string
		document       string
		key, layout    string
		wanted, blocks string
		manage         bool
		when           sharing.WhenBusy
		err            string
	}{
		{"a profile's", "mig: {manage: true, config: all-balanced}", "", "", "all-balanced", "none", true, sharing.WaitWhenBusy, ""},
		{"a profile's without manage", "mig: {config: all-balanced}", "", "", "all-balanced", "none", false, sharing.WaitWhenBusy, ""},
		{"named beside a profile", "mig: {config: all-balanced}", "", "all-enabled", "all-enabled", "none", true, sharing.WaitWhenBusy, ""},
		{"an empty profile", "", "", "", "", "none", false, sharing.WaitWhenBusy, ""},
		{"mig-parted's", layouts, "", "two", "two", "some", true, sharing.WaitWhenBusy, ""},
		{"built in, beside mig-parted's", layouts, "", "all-disabled", "all-disabled", "none", true, sharing.WaitWhenBusy, ""},
		{"mig-parted's, none named", layouts, "", "", "", "", false, "", "f has layouts, name one of one, two"},
		{"mig-parted's, with a key", layouts, "k", "one", "", "", false, "", `select "k" from f: it has no profile`},
		{"mig-parted's, another name", layouts, "", "three", "", "", true, "", `MIG layout "three": no layout has this name`},
		{"a ConfigMap with layouts only", manifest + indented, "", "one", "one", "some", true, sharing.WaitWhenBusy, ""},
		{"a ConfigMap, by key", manifest + indented + profiles, "a", "", "one", "some", true, sharing.RefuseWhenBusy, ""},
		{"a ConfigMap, by key and name", manifest + indented + profiles, "a", "two", "two", "some", true, sharing.RefuseWhenBusy, ""},
		{"a ConfigMap without a key", manifest + indented + profiles, "", "two", "", "", false, "", "choose one of a, b"},
	} {
		t.Run(row.name, func(t *testing.T) {
			file, err := ParseFile("f", []byte(row.document), nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := file.MIGLayout(row.key, row.layout)
			if row.err != "" {
				if err == nil || !strings.Contains(err.Error(), row.err) {
					t.Errorf("error %v, want %q", err, row.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.Name != row.wanted || got.Manage != row.manage || got.WhenBusy != row.when || (got.Blocks == nil) != (row.blocks == "none") {
				t.Errorf("got %+v", got)
			}
		})
	}
}
