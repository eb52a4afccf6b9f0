// Package agent is the program's loop: whenever something changes, it reads the
// node's GPUs and the profile again, plans what to offer, and hands the plan to the
// plugin manager. It also says what it is doing, over HTTP, in metrics and to
// Kubernetes; HTTP changes nothing.
//
// It adapts nothing itself. What it reads from are interfaces such as Node and
// ConfigSource, which internal/daemon fills.
//
// Read agent.go first (Options, the order in which things start and end), then
// loop.go (from the inputs to a plan), report.go (how far a profile has come),
// sample.go (who uses the GPUs) and mig.go. What is shown is in status.go and
// statusview.go, page.go, metrics.go and http.go.
package agent
