// Package metrics shows plans and allocations to Prometheus.
//
// Each collector makes constant metrics at a scrape from what its source has at hand:
// nothing needs to be reset, and what is gone leaves no series behind. A scrape never
// asks the driver or the kubelet.
package metrics
