// Package agent is the program's loop. Whenever something changes, it reads the node's GPUs and the
// profile again, lets package decide choose what to offer, and passes the result to DRA and to the
// plugin manager. It also reports it: over HTTP, in metrics and to Kubernetes.
//
// It contains no adapters: its inputs are interfaces such as Node and ConfigSource, which
// internal/daemon implements.
//
// Some parts act on their own beside the loop: packages migchange, drapath, release, gpusettings,
// mpsshare and memoryguard. They do not know the loop. It asks them for reservations, warnings and
// facts, and wakes those that depend on its decision. They request a new decision when their facts
// change.
//
// Read the files in the order in which things happen:
//
//   - parts.go makes the parts with their inputs.
//   - agent.go starts and ends them (run). Options are the program's inputs.
//   - loop.go gathers, decides and acts (decide).
//   - report.go determines how far the profile has been applied, and reports it to Kubernetes.
//   - sample.go regularly reads the holders and the use of the GPUs.
//   - statusview.go and metrics.go answer HTTP requests (package web) with all that; forecast.go
//     predicts the effect of another label of the Node.
package agent
