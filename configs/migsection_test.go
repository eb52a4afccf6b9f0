package configs

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// layoutDocument has a profile that names layouts of its own and of another
// key, where mig-parted's own document stands.
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
      for-a-new-board: [{device-filter: "0x111110DE", devices: all, mig-enabled: true, mig-devices: {9g.9gb: 1}}]
      impossible: [{devices: all, mig-enabled: true, mig-devices: {9g.9gb: 1}}]
`

func layoutsOf(t *testing.T) map[string]Config {
	t.Helper()
	m, err := ParseFile("m", []byte(layoutDocument), nil)
	if err != nil {
		t.Fatal(err)
	}
	byKey := make(map[string]Config)
	for _, e := range m.ConfigMap.Entries {
		byKey[e.Key] = e.Config
	}
	return byKey
}

func all(t *testing.T, text string) []sharing.LayoutBlock {
	t.Helper()
	layout := mig.Layout{MIG: true}
	if text != "" {
		layout.Partitions = []mig.Count{{Profile: profile(t, text), Count: 1}}
	}
	return []sharing.LayoutBlock{{All: true, Layout: layout}}
}

func TestMIGSection(t *testing.T) {
	mine := []sharing.LayoutBlock{
		{Indexes: []int{0}, Layout: mig.Layout{MIG: true, Partitions: []mig.Count{
			{Profile: profile(t, "1g.5gb"), Count: 2}, {Profile: profile(t, "2g.10gb"), Count: 1},
		}}},
		{Indexes: []int{1}},
	}
	theirs := all(t, "7g.40gb")
	theirs[0].Filters = []sharing.BoardFilter{{Device: 0x20B010DE}}
	for key, want := range map[string]sharing.Repartition{
		"inline":     {Manage: true, Name: "mine", Blocks: mine, WhenBusy: sharing.Refuse},
		"label-only": {Manage: true, WhenBusy: sharing.Wait},
		"hands-off":  {Name: "theirs", Blocks: theirs, WhenBusy: sharing.Wait},
	} {
		if diff := cmp.Diff(want, layoutsOf(t)[key].Profile.MIG); diff != "" {
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
		{"no such profile", "inline", "all-1g.7gb", "mine", nil, "no published board has the profile"},
		{"impossible", "label-only", "impossible", "", nil, "block 0 of the layout: no published board that it chooses has the profile 9g.9gb"},
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
			if diff := cmp.Diff(want, got.Profile.MIG.Blocks); diff != "" {
				t.Errorf("blocks (-want +got):\n%s", diff)
			}
		})
	}
	selected, err := layoutsOf(t)["label-only"].SelectMIG("for-a-new-board")
	if err != nil || len(selected.Profile.MIG.Blocks) != 1 {
		t.Errorf("a board that is not published: %v, %v", selected.Profile.MIG, err)
	}
}

func TestParseWith(t *testing.T) {
	document := []byte("mig: {manage: true, config: theirs}")
	if _, err := Parse("f", document, nil); err == nil || !strings.Contains(err.Error(), "f:1: mig.config: no layout has this name") {
		t.Errorf("alone: %v", err)
	}
	config, err := ParseWith("f", document, nil, MIGConfigs{{Name: "theirs", Blocks: all(t, "1g.5gb")}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(all(t, "1g.5gb"), config.Profile.MIG.Blocks); diff != "" {
		t.Errorf("blocks (-want +got):\n%s", diff)
	}
}

func TestMIGNotes(t *testing.T) {
	config, err := Parse("f", []byte("mig:\n  config: all-balanced\n"), nil)
	if err != nil {
		t.Fatal(err)
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
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}
