package sharing_test

import (
	"testing"

	"github.com/virgate/virgate/sharing"
)

// TestLayoutState holds the words of mig-manager's label: one board that failed
// is a node that did, and one that waits is one that does.
func TestLayoutState(t *testing.T) {
	for _, test := range []struct {
		name    string
		states  []sharing.LayoutState
		refused bool
		want    string
	}{
		{"no board", nil, false, ""},
		{"all applied", []sharing.LayoutState{sharing.LayoutApplied, sharing.LayoutApplied}, false, "success"},
		{"one waits", []sharing.LayoutState{sharing.LayoutApplied, sharing.LayoutBlocked, sharing.LayoutApplied}, false, "pending"},
		{"the first waits", []sharing.LayoutState{sharing.LayoutResetRequired, sharing.LayoutApplied}, false, "pending"},
		{"one failed", []sharing.LayoutState{sharing.LayoutBlocked, sharing.LayoutFailed, sharing.LayoutApplied}, false, "failed"},
		{"refused", []sharing.LayoutState{sharing.LayoutApplied}, true, "failed"},
		{"refused, no board", nil, true, "failed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			report := sharing.NodeReport{LayoutRefused: test.refused}
			for _, state := range test.states {
				report.Layouts = append(report.Layouts, sharing.BoardLayout{State: state})
			}
			if got := report.LayoutState(); got != test.want {
				t.Errorf("state %q, want %q", got, test.want)
			}
		})
	}
}
