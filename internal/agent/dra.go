package agent

import (
	"maps"
	"slices"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/status"
)

// draStatus is nil where nothing is offered so.
func (a *agent) draStatus() *status.DRA {
	if a.DRA.Driver == nil {
		return nil
	}
	view := a.DRA.Claims.View()
	status := &status.DRA{DriverState: a.DRA.Driver.State(), Paths: view.Paths, Claims: append([]dra.Claim{}, view.Claims...), Refused: []claims.Refused{}}
	for _, uid := range slices.Sorted(maps.Keys(view.Refused)) {
		status.Refused = append(status.Refused, view.Refused[uid])
	}
	return status
}
