// Package plugin serves a plan to the kubelet: one gRPC server for each resource, on a
// socket of its own, which is registered again whenever the kubelet disconnects it.
//
// The package does not know NVML, profiles or Kubernetes' API, and it never looks at
// the node's files: what the kubelet holds and has applied it asks a Kubelet, what
// grants need it is given as a Host. docs/explanation/kubelet.md has the reasons behind the
// protocol.
//
// Read next.go and switch.go for the decision what each resource lists next, a pure
// function; kubelet.go, manager.go and reconcile.go for the loop around it; and
// generation.go, server.go, allocate.go and refusal.go for what answers the kubelet's
// calls. registrar.go keeps a server registered.
package plugin
