// Package plugin serves a plan to the kubelet: one gRPC server for each resource, on a socket of
// its own, which is registered again whenever the kubelet disconnects it.
//
// The package does not know NVML, profiles or the Kubernetes API, and it reads none of the node's
// files. A Kubelet tells it what the kubelet holds and has applied, and a grant.Host what grants
// need. docs/explanation/kubelet.md gives the reasons behind the protocol.
//
// next.go and switch.go decide what each resource lists next, as a pure function. kubelet.go,
// manager.go and reconcile.go are the loop around it. generation.go, server.go, allocate.go and
// refusal.go answer the kubelet's calls. registrar.go keeps a server registered, and announce.go
// tells the API server about lists.
package plugin
