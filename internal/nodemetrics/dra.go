package nodemetrics

import (
	_ "embed"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing/metrics"
)

//go:embed dra.txt
var draFamilies string

// DRA is the state of the node's Dynamic Resource Allocation at one moment.
type DRA struct {
	State dra.DriverState
	View  claims.View
	// Units are the units of the last plan, by place.
	Units map[string]decide.Unit
}

// NewDRACollector returns a collector that shows what read returns at each scrape.
func NewDRACollector(read func() DRA) prometheus.Collector {
	return metrics.OfTable(draFamilies, func(send metrics.Send) { collectDRA(send, read()) })
}

func collectDRA(send metrics.Send, now DRA) {
	state := now.State
	view := now.View
	all := now.Units
	send("dra_registered", metrics.BoolToFloat(state.Registered))
	send("dra_slices", float64(state.Slices))
	if state.Unwritten || !state.Written.IsZero() {
		send("dra_slices_written", metrics.BoolToFloat(!state.Unwritten))
	}
	send("dra_slice_writes_total", float64(state.Writes))
	send("dra_publish_failures_total", float64(state.WriteFailures))

	type unitsOf struct {
		resource string
		path     units.Path
	}
	held, paths := map[string]int{}, map[unitsOf]int{}
	for unitName, unit := range all {
		if unit.ForDRA || view.Paths[unitName] != units.Plugin {
			held[unit.Resource] += 0
			for _, path := range []units.Path{units.LeavingPlugin, units.DRA, units.LeavingDRA} {
				paths[unitsOf{unit.Resource, path}] += 0
			}
		}
	}
	for unitName, path := range view.Paths {
		paths[unitsOf{all[unitName].Resource, path}]++
	}
	for of, n := range paths {
		send("dra_units", float64(n), of.resource, string(of.path))
	}
	for _, claim := range view.Claims {
		resources := map[string]bool{}
		for _, r := range claim.Results {
			resources[all[dra.UnitNameOf(r.Device)].Resource] = true
		}
		for resource := range resources {
			held[resource]++
		}
	}
	for resource, n := range held {
		send("claims", float64(n), resource)
	}
	refused := map[claims.Cause]int{}
	for _, r := range view.Refused {
		refused[r.Cause]++
	}
	for _, cause := range claims.Causes() {
		send("claims_refused", float64(refused[cause]), string(cause))
	}
}
