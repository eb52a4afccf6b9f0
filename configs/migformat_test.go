package configs

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

func TestFormatMIGConfigs(t *testing.T) {
	layouts := MIGConfigs{
		{Name: "a \"name\": odd", Blocks: []sharing.LayoutBlock{{All: true}}},
		{Name: "current", Blocks: []sharing.LayoutBlock{
			{
				Filters: []sharing.BoardFilter{{Device: 0x20B010DE}, {Device: 0x20B210DE, Subsystem: 0x134F10DE}},
				Indexes: []int{0, 3},
				Layout: mig.Layout{MIG: true, Partitions: []mig.Count{
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
	if diff := cmp.Diff(layouts, again); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	if text, err := FormatMIGConfigs(nil); err == nil {
		t.Errorf("nothing is written as %q", text)
	}
}
