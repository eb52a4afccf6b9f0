// Package metrics shows plans and allocations to Prometheus.
//
// At each scrape, each collector makes constant metrics from the data its source already has.
// Nothing needs to be reset, and removed objects leave no series behind. A scrape never queries the
// driver or the kubelet.
package metrics
