package sharing

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestGrants(t *testing.T) {
	tests := []struct {
		name                            string
		grants                          Grants
		envvar, cdi, onlyCDI, withNodes bool
	}{
		{name: "no strategy", envvar: true},
		{name: "envvar", grants: Grants{Strategies: []DeviceListStrategy{Envvar}}, envvar: true},
		{name: "volume-mounts", grants: Grants{Strategies: []DeviceListStrategy{VolumeMounts}}},
		{name: "cdi-cri", grants: Grants{Strategies: []DeviceListStrategy{CDICRI}}, cdi: true, onlyCDI: true},
		{name: "both kinds of CDI", grants: Grants{Strategies: []DeviceListStrategy{CDIAnnotations, CDICRI}}, cdi: true, onlyCDI: true},
		{name: "CDI and a mount", grants: Grants{Strategies: []DeviceListStrategy{CDIAnnotations, VolumeMounts}}, cdi: true},
		{name: "CDI and a variable", grants: Grants{Strategies: []DeviceListStrategy{Envvar, CDICRI}}, envvar: true, cdi: true},
		{name: "driver-mounts", grants: Grants{Strategies: []DeviceListStrategy{DriverMounts}}, withNodes: true},
		{name: "CDI and driver-mounts", grants: Grants{Strategies: []DeviceListStrategy{DriverMounts, CDICRI}}, cdi: true, withNodes: true},
		{name: "device nodes", grants: Grants{DeviceNodes: true}, envvar: true, withNodes: true},
		{name: "device nodes that CDI brings", grants: Grants{DeviceNodes: true, Strategies: []DeviceListStrategy{CDICRI}}, cdi: true, onlyCDI: true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			g := test.grants
			got := [4]bool{g.Uses(Envvar), g.CDI(), g.OnlyCDI(), g.Nodes()}
			if want := [4]bool{test.envvar, test.cdi, test.onlyCDI, test.withNodes}; got != want {
				t.Errorf("envvar, CDI, only CDI, nodes are %v, want %v", got, want)
			}
		})
	}
}

func TestGrantsExtras(t *testing.T) {
	got := Grants{MOFED: true, GDS: true, GDRCopy: true}.Extras()
	if diff := cmp.Diff([]string{"gdrcopy", "gds", "mofed"}, got); diff != "" {
		t.Error(diff)
	}
	if got := (Grants{}).Extras(); got != nil {
		t.Errorf("%v of nothing", got)
	}
}

// TestSharedVariableIsMentioned checks that resources that use the same variable are reported as a conflict, not
// as a warning of the plan.
func TestSharedVariableIsMentioned(t *testing.T) {
	two := defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: 2, Rename: "nvidia.com/half", Select: Selection{Count: 1}})
	tests := []struct {
		name       string
		profile    Profile
		strategies []DeviceListStrategy
		warned     bool
	}{
		{"one resource", defaults(), []DeviceListStrategy{Envvar}, false},
		{"two by envvar", two, []DeviceListStrategy{Envvar}, true},
		{"two by mounts", two, []DeviceListStrategy{VolumeMounts}, false},
		{"two by envvar beside mounts", two, []DeviceListStrategy{Envvar, VolumeMounts}, false},
		{"two by envvar beside CDI", two, []DeviceListStrategy{Envvar, CDICRI}, false},
		{"two by envvar beside the driver", two, []DeviceListStrategy{Envvar, DriverMounts}, false},
		{"two by CDI", two, []DeviceListStrategy{CDIAnnotations}, false},
		{"two and nothing said", two, nil, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			test.profile.Grants.Strategies = test.strategies
			plan := NewPlan(node(2), test.profile)
			if got := strings.Join(plan.Grants.Conflicts(plan.Resources), "\n"); strings.Contains(got, "asks for two resources") != test.warned {
				t.Errorf("conflicts are %q", got)
			}
			if len(plan.Warnings) > 0 { // VirgatePlanWarnings would be on for ever.
				t.Errorf("warnings are %q", plan.Warnings)
			}
			if diff := cmp.Diff(test.profile.Grants, plan.Grants); diff != "" {
				t.Errorf("grants (-profile +plan):\n%s", diff)
			}
		})
	}
}
