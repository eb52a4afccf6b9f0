// Package kube makes the requests to the Kubernetes API so that ten thousand nodes may make them at
// once: each has a deadline, none is repeated by the library, and what fails or is cut comes back
// after a random and growing time, not before the API server wants it. docs/internals/scale.md has
// what that costs a server.
//
// It does not know what the requests are for. Read client.go first; transport.go has the connection,
// watch.go what keeps lists up to date.
package kube
