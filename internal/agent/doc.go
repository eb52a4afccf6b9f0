// Package agent is the program's loop: whenever something changes, it reads the
// node's GPUs and the profile again, has package decide decide what to offer, and hands
// that to the plugin manager and to DRA. It also says what it is doing, by package web over HTTP, in
// metrics and to Kubernetes.
//
// It adapts nothing itself. What it reads from are interfaces such as Node and
// ConfigSource, which internal/daemon fills.
//
// Read agent.go first (Options, the order in which things start and end), then
// loop.go (it reads the facts, has package decide decide, and acts), report.go (how far a profile has come),
// sample.go (who uses the GPUs) and mig.go. What is shown is in package status, and
// made in statusview.go, metrics.go (for package nodemetrics) and web.go.
package agent
