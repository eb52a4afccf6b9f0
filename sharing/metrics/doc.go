// Package metrics shows plans and allocations to Prometheus.
//
// A Collector makes constant metrics at each scrape from what its Source has
// at hand, so nothing needs to be reset and what is gone leaves no series
// behind. A scrape never asks the driver or the kubelet.
package metrics
