package configs

import (
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
	want := MIGConfigs{
		{Name: "all-disabled", Blocks: []sharing.LayoutBlock{{All: true}}},
		{Name: "all-enabled", Blocks: []sharing.LayoutBlock{{All: true, Layout: mig.Layout{MIG: true}}}},
		{Name: "later", Blocks: []sharing.LayoutBlock{
			{
				Filters: []sharing.BoardFilter{{Device: 0x20B010DE}, {Device: 0x20B210DE, Subsystem: 0x134F10DE}},
				Indexes: []int{1, 0},
				Layout: mig.Layout{MIG: true, Partitions: []mig.Count{
					{Profile: profile(t, "1g.5gb"), Count: 3}, {Profile: profile(t, "1g.5gb+me"), Count: 1}, {Profile: profile(t, "2g.10gb"), Count: 1},
				}},
			},
			{Filters: []sharing.BoardFilter{{Device: 0x233010DE}}, Indexes: []int{2}},
		}},
	}
	got, err := ParseMIGConfigs("mig.yaml", []byte(document))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
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
