package nodereport_test

import (
	"testing"

	"github.com/virgate/virgate/internal/nodereport"
)

// TestLayoutState checks mig-manager's label: if one GPU failed, the node did, and if one waits, the node does.
func TestLayoutState(t *testing.T) {
	for _, test := range []struct {
		name    string
		states  []nodereport.LayoutState
		refused bool
		want    string
	}{
		{"no GPU", nil, false, ""},
		{"all applied", []nodereport.LayoutState{nodereport.LayoutApplied, nodereport.LayoutApplied}, false, "success"},
		{"one waits", []nodereport.LayoutState{nodereport.LayoutApplied, nodereport.LayoutBlocked, nodereport.LayoutApplied}, false, "pending"},
		{"the first waits", []nodereport.LayoutState{nodereport.LayoutResetRequired, nodereport.LayoutApplied}, false, "pending"},
		{"one failed", []nodereport.LayoutState{nodereport.LayoutBlocked, nodereport.LayoutFailed, nodereport.LayoutApplied}, false, "failed"},
		{"refused", []nodereport.LayoutState{nodereport.LayoutApplied}, true, "failed"},
		{"refused, no GPU", nil, true, "failed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			report := nodereport.Report{LayoutRefused: test.refused}
			for _, state := range test.states {
				report.Layouts = append(report.Layouts, nodereport.GPULayout{State: state})
			}
			if got := report.LayoutState(); got != test.want {
				t.Errorf("state %q, want %q", got, test.want)
			}
		})
	}
}
