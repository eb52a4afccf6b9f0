package nodemetrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/plugin"
)

// Calls measures the kubelet's calls. It is a plugin.CallMetrics and a prometheus.Collector.
type Calls struct{ took, preferred *prometheus.HistogramVec }

// NewCalls returns a Calls without measurements.
func NewCalls() *Calls {
	return &Calls{
		took: callHistogram("allocate_duration_seconds", "How long Allocate took, by result: ok, error.",
			"resource", "result"),
		preferred: callHistogram("preferred_allocation_duration_seconds", "How long GetPreferredAllocation took.",
			"resource"),
	}
}

// callHistogram returns a histogram with buckets for calls that take some microseconds. The
// kubelet's pod handling waits for each call, so calls of more than a second are distinguished too.
func callHistogram(name, help string, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "virgate_" + name,
		Help:    help,
		Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .1, .5, 2.5},
	}, labels)
}

// Start implements plugin.CallMetrics.
func (c *Calls) Start(resource string) plugin.CallObservers {
	return plugin.CallObservers{
		Granted:   c.took.WithLabelValues(resource, "ok"),
		Refused:   c.took.WithLabelValues(resource, "error"),
		Preferred: c.preferred.WithLabelValues(resource),
	}
}

// Stop implements plugin.CallMetrics.
func (c *Calls) Stop(resource string) {
	c.took.DeletePartialMatch(prometheus.Labels{"resource": resource})
	c.preferred.DeleteLabelValues(resource)
}

// Describe implements prometheus.Collector.
func (c *Calls) Describe(ch chan<- *prometheus.Desc) {
	c.took.Describe(ch)
	c.preferred.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c *Calls) Collect(ch chan<- prometheus.Metric) {
	c.took.Collect(ch)
	c.preferred.Collect(ch)
}

// NewSwitches returns a histogram of the time from a change of the profile until the scheduler
// knows of it. The kubelet alone takes up to 10 s.
func NewSwitches() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "virgate_switch_schedulable_seconds",
		Help: "Time from when another profile is taken up until the Node's status.allocatable says what the kubelet " +
			"was told, for each resource whose number changes. " +
			"Units that pods hold are not waited for. Not counted: the first profile, and what Virgate could not " +
			"write to the Node (virgate_announcements_total). Absent where it writes nothing.",
		Buckets: []float64{.1, .25, .5, 1, 2.5, 5, 10, 20, 30, 60},
	})
}

// ClaimCalls measures the kubelet's calls for claims. It is a prometheus.Collector.
type ClaimCalls struct {
	took   *prometheus.HistogramVec
	failed *prometheus.CounterVec
}

// NewClaimCalls returns a ClaimCalls without measurements.
func NewClaimCalls() *ClaimCalls {
	c := &ClaimCalls{
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "virgate_claim_call_duration_seconds",
			Help: "How long a claim's call took, prepare or unprepare, by result: ok, error. Prepare reads the " +
				"claim from the API server.",
			Buckets: []float64{.001, .005, .025, .1, .5, 2.5, 10},
		}, []string{"call", "result"}),
		failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "virgate_claim_call_failures_total",
			Help: "Calls for claims that failed, by the reasons of virgate_claims_refused; the kubelet calls again " +
				"and again.",
		}, []string{"call", "reason"}),
	}
	for _, call := range []string{"prepare", "unprepare"} { // Start at 0, so that the first increase shows.
		c.took.WithLabelValues(call, "ok")
		c.took.WithLabelValues(call, "error")
		for _, cause := range claims.Causes() {
			c.failed.WithLabelValues(call, string(cause))
		}
	}
	return c
}

// Observe records a finished call; call is prepare or unprepare.
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
