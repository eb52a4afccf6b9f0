// Package agent is the program's loop: whenever something changes, it reads the
// node's GPUs and the profile again, has package decide decide what to offer, and hands
// that to DRA and to the plugin manager. It also tells of it: over HTTP, in metrics and to
// Kubernetes.
//
// It adapts nothing itself. What it reads from are interfaces such as Node and
// ConfigSource, which internal/daemon fills.
//
// Beside the loop run parts that act by themselves: packages migchange, drapath, release,
// gpusettings, mpsshare and memoryguard. They know nothing of the loop. It asks them for
// reservations, for warnings and for what is known, and has those look again that go by
// what it has decided. They ask it to decide again.
//
// Read in the order in which things happen:
//
//   - parts.go makes the parts, and says what each is given.
//   - agent.go starts and ends them (run). Options are what the program is given.
//   - loop.go gathers, decides and acts (decide).
//   - report.go finds out how far the profile has come, and reports it to Kubernetes.
//   - sample.go asks now and then who holds what and how the GPUs are used.
//   - statusview.go and metrics.go show all that, when somebody asks over HTTP (package web);
//     forecast.go says what another label of the Node would do.
package agent
