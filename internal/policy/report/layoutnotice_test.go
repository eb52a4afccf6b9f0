package report

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

func TestLayoutNotices(t *testing.T) {
	board := func(wanted string, state sharing.LayoutState, reason string) []sharing.BoardLayout {
		return []sharing.BoardLayout{{GPU: "GPU-a", Index: 3, Wanted: wanted, State: state, Reason: reason}}
	}
	applied, blocked := board("day", sharing.LayoutApplied, ""), board("day", sharing.LayoutBlocked, "1g.5gb is in use")
	pending := board("day", sharing.LayoutPending, "devices are being withdrawn")
	for _, test := range []struct {
		name       string
		last, next []sharing.BoardLayout
		want       []string
	}{
		{"no board", nil, nil, nil},
		{"applied at the start", nil, applied, nil},
		{"blocked at the start", nil, blocked, []string{"Warning MIGBlocked GPU 3 (GPU-a) does not have layout day: 1g.5gb is in use"}},
		{"on the way", applied, pending, nil},
		{"there", pending, applied, []string{"Normal MIGApplied GPU 3 (GPU-a) has layout day"}},
		{"recovered", blocked, applied, []string{"Normal MIGApplied GPU 3 (GPU-a) has layout day"}},
		{"still blocked", blocked, blocked, nil},
		{"another layout, at once", applied, board("night", sharing.LayoutApplied, ""), []string{"Normal MIGApplied GPU 3 (GPU-a) has layout night"}},
		{"blocked for another reason", blocked, board("day", sharing.LayoutBlocked, "2g.10gb is in use"), []string{"Warning MIGBlocked GPU 3 (GPU-a) does not have layout day: 2g.10gb is in use"}},
		{"failed", pending, board("day", sharing.LayoutFailed, "driver"), []string{"Warning MIGFailed GPU 3 (GPU-a) does not have layout day: driver"}},
		{"reset", pending, board("day", sharing.LayoutResetRequired, "mode"), []string{"Warning MIGResetRequired GPU 3 (GPU-a) does not have layout day: mode"}},
		{"given up", blocked, nil, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, n := range notices(&sharing.NodeReport{Layouts: test.last}, sharing.NodeReport{Layouts: test.next}) {
				got = append(got, n.kind+" "+n.reason+" "+n.message)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
