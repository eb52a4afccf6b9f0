// Package nodemetrics has the metrics of the program that serves a node: its own state, the
// progress of the profile and of the GPUs' MIG layouts, the claims, and the kubelet's calls. The
// metrics of plans, allocations and utilization are in sharing/metrics. The collectors read their
// values at each scrape.
package nodemetrics
