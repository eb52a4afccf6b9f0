// Package nodemetrics has the metrics of the program that serves a node: how it fares itself, how far the
// profile and the GPUs' MIG layouts are, what claims have, and the kubelet's calls. Plans, allocations and
// utilization are in sharing/metrics. Its collectors read values that they are given at each scrape.
package nodemetrics
