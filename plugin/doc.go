// Package plugin serves a plan to the kubelet: one gRPC server for each
// resource, on a socket of its own, registered again whenever the kubelet lets
// go of it.
//
// What a resource's next list is, Next decides, a pure function; Manager calls
// it and owns the servers. A server knows one resource, its immutable current
// generation, and how to stay registered.
//
// The package does not know NVML, profiles or Kubernetes' API. What the kubelet
// holds and has applied it asks a Kubelet. The reasons behind the protocol are
// in docs/architecture.md.
package plugin
