package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Constant returns a metric with one value. What is not UTF-8 in a label, as a
// name from the driver may have, is shown as U+FFFD, for Prometheus takes nothing
// else and one such name must not cost the scrape. With too few or too many
// labels the metric is invalid, which the scrape reports and goes on.
func Constant(desc *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) prometheus.Metric {
	metric, err := prometheus.NewConstMetric(desc, kind, value, labels...)
	if err == nil {
		return metric
	}
	clean := make([]string, len(labels))
	for i, label := range labels {
		clean[i] = strings.ToValidUTF8(label, "\uFFFD")
	}
	if metric, err = prometheus.NewConstMetric(desc, kind, value, clean...); err != nil {
		return prometheus.NewInvalidMetric(desc, err)
	}
	return metric
}
