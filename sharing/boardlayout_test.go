package sharing_test

import (
	"testing"

	"github.com/virgate/virgate/sharing"
)

// TestLayoutOutcome holds the words of mig-manager's label: one board that
// failed is a node that did, and one that waits is one that does.
func TestLayoutOutcome(t *testing.T) {
	board := func(state sharing.LayoutState) sharing.BoardLayout {
		return sharing.BoardLayout{State: state, Reason: string(state)}
	}
	for _, test := range []struct {
		states        []sharing.LayoutState
		state, reason string
	}{
		{nil, "", ""},
		{[]sharing.LayoutState{sharing.LayoutApplied, sharing.LayoutApplied}, "success", ""},
		{[]sharing.LayoutState{sharing.LayoutApplied, sharing.LayoutBlocked, sharing.LayoutPending}, "pending", "blocked"},
		{[]sharing.LayoutState{sharing.LayoutResetRequired, sharing.LayoutApplied}, "pending", "reset-required"},
		{[]sharing.LayoutState{sharing.LayoutBlocked, sharing.LayoutApplied, sharing.LayoutFailed}, "failed", "failed"},
	} {
		var boards []sharing.BoardLayout
		for _, state := range test.states {
			boards = append(boards, board(state))
		}
		if state, reason := sharing.LayoutOutcome(boards); state != test.state || reason != test.reason {
			t.Errorf("%v: %q (%q), want %q (%q)", test.states, state, reason, test.state, test.reason)
		}
	}
}
