package agent

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/sharing"
)

// TestOnTheWay has boards with another layout than the wanted one be pending, so
// that nobody takes the state of the last layout for that of the next.
func TestOnTheWay(t *testing.T) {
	boards := []sharing.BoardLayout{
		{GPU: "GPU-a", Wanted: "night", State: sharing.LayoutBlocked, Reason: "in use"},
		{GPU: "GPU-b", Wanted: "day", State: sharing.LayoutApplied},
	}
	wish := func(mig sharing.Repartition) *configs.Selected {
		return &configs.Selected{Profile: sharing.Profile{MIG: mig}}
	}
	pending := sharing.BoardLayout{GPU: "GPU-b", Wanted: "night", State: sharing.LayoutPending}
	for _, test := range []struct {
		name    string
		profile *configs.Selected
		want    []sharing.BoardLayout
	}{
		{"another layout", wish(sharing.Repartition{Manage: true, Name: "night"}), []sharing.BoardLayout{boards[0], pending}},
		{"no layout", wish(sharing.Repartition{Manage: true}), boards},
		{"nothing is cut any more", wish(sharing.Repartition{Name: "night"}), boards},
		{"no profile", nil, boards},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := fmt.Sprint(boards)
			if diff := cmp.Diff(test.want, onTheWay(boards, test.profile)); diff != "" {
				t.Error(diff)
			}
			if fmt.Sprint(boards) != before {
				t.Error("what was published has changed")
			}
		})
	}
}

// TestLayoutRefused tells a label's value that is no layout from what else can
// be wrong with a profile.
func TestLayoutRefused(t *testing.T) {
	reporter := newFakeReporter()
	policy := selectedPolicy{newInput(named(4, "g1"), nil)}
	newRig(t, func(r *rig) { r.options.Reporter, r.options.Policy = reporter, policy })
	reporter.await(t, "the profile", reported(sharing.ProfileApplied, "Serving"))
	for _, test := range []struct {
		name string
		err  error
		want bool
	}{
		{"layout", fmt.Errorf("label: %w", configs.ErrLayout), true},
		{"another problem", errors.New("p.yaml:1: x"), false},
	} {
		policy.set(selected(""), test.err)
		got := reporter.await(t, test.name, func(r sharing.NodeReport) bool { return r.Problem == test.err.Error() })
		if got.LayoutRefused != test.want {
			t.Errorf("%s: refused %v", test.name, got.LayoutRefused)
		}
	}
}
