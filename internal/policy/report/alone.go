package report

import (
	"reflect"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// alone says that what is news in next after last concerns this node: its
// start, its units' health, that it can or cannot serve, a profile of another
// name, as labels are changed node by node, and how far its boards are. All else
// follows from the text of a profile, which an edit changes on many nodes at
// once; so does that it cannot serve while a profile is on its way.
func alone(last, next sharing.NodeReport) bool {
	started := last.Applied == (sharing.ProfileRef{})
	served := last.Ready != next.Ready && last.State != sharing.ProfilePending && next.State != sharing.ProfilePending
	chosen := last.Wanted.Name != next.Wanted.Name
	return started || served || chosen || progressed(last.Layouts, next.Layouts) || !reflect.DeepEqual(last.Units, next.Units)
}

// progressed says that boards are nearer to the layouts that they were to have
// before.
func progressed(last, next []sharing.BoardLayout) bool {
	same := slices.EqualFunc(last, next, func(a, b sharing.BoardLayout) bool { return a.GPU == b.GPU && a.Wanted == b.Wanted })
	return same && !reflect.DeepEqual(last, next)
}
