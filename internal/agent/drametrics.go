package agent

import (
	_ "embed"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing/metrics"
)

//go:embed drametrics.txt
var draFamilies string

// draCollector is a prometheus.Collector that shows what the node has by Dynamic Resource Allocation.
type draCollector struct {
	metrics.Families
	agent *agent
}

func (c draCollector) Collect(ch chan<- prometheus.Metric) {
	send := c.To(ch)
	state, view := c.agent.DRA.Driver.State(), c.agent.DRA.Claims.View()
	send("dra_registered", metrics.BoolToFloat(state.Registered))
	send("dra_slices", float64(state.Slices))
	if state.Unwritten || !state.Written.IsZero() {
		send("dra_slices_written", metrics.BoolToFloat(!state.Unwritten))
	}
	send("dra_slice_writes_total", float64(state.Writes))
	send("dra_publish_failures_total", float64(state.WriteFailures))

	all := c.agent.dra.Units()
	type unitsOf struct {
		resource string
		path     units.Path
	}
	held, paths := map[string]int{}, map[unitsOf]int{}
	for place, unit := range all {
		if unit.ForDRA || view.Paths[place] != units.Plugin {
			held[unit.Resource] += 0
			for _, path := range []units.Path{units.LeavingPlugin, units.DRA, units.LeavingDRA} {
				paths[unitsOf{unit.Resource, path}] += 0
			}
		}
	}
	for place, path := range view.Paths {
		paths[unitsOf{all[place].Resource, path}]++
	}
	for of, n := range paths {
		send("dra_units", float64(n), of.resource, string(of.path))
	}
	for _, claim := range view.Claims {
		resources := map[string]bool{}
		for _, r := range claim.Results {
			resources[all[dra.PlaceOf(r.Device)].Resource] = true
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

// ClaimCalls measures the kubelet's calls for claims. It is a prometheus.Collector.
type ClaimCalls struct {
	took   *prometheus.HistogramVec
	failed *prometheus.CounterVec
}

// NewClaimCalls returns one that has measured nothing.
func NewClaimCalls() *ClaimCalls {
	c := &ClaimCalls{
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "virgate_claim_call_duration_seconds", Help: "How long a claim's call took, prepare or unprepare, by result: ok, error. Prepare reads the claim from the API server.",
			Buckets: []float64{.001, .005, .025, .1, .5, 2.5, 10},
		}, []string{"call", "result"}),
		failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "virgate_claim_call_failures_total", Help: "Calls for claims that failed, by the reasons of virgate_claims_refused; the kubelet calls again and again.",
		}, []string{"call", "reason"}),
	}
	for _, call := range []string{"prepare", "unprepare"} { // From 0, so that the first increase shows.
		c.took.WithLabelValues(call, "ok")
		c.took.WithLabelValues(call, "error")
		for _, cause := range claims.Causes() {
			c.failed.WithLabelValues(call, string(cause))
		}
	}
	return c
}

// Observe is told of a call, prepare or unprepare, that has ended.
func (c *ClaimCalls) Observe(call string, took time.Duration, err error) {
	result := "ok"
	if err != nil {
		result = "error"
		c.failed.WithLabelValues(call, string(claims.CauseOf(err))).Inc()
	}
	c.took.WithLabelValues(call, result).Observe(took.Seconds())
}

// Describe implements prometheus.Collector.
func (c *ClaimCalls) Describe(ch chan<- *prometheus.Desc) {
	c.took.Describe(ch)
	c.failed.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c *ClaimCalls) Collect(ch chan<- prometheus.Metric) {
	c.took.Collect(ch)
	c.failed.Collect(ch)
}
