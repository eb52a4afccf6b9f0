// Package kube makes requests to the Kubernetes API so that ten thousand nodes can make them at
// once. Each request has a deadline, and client-go retries none. What fails or is cut is retried
// after a random, growing delay, and not before the time that the API server asked for.
// docs/internals/scale.md has the load on a server.
//
// It does not know what the requests are for. Read client.go first; transport.go has the connection,
// watch.go what keeps lists up to date.
package kube
