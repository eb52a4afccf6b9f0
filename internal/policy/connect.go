package policy

import (
	"errors"
	"io"
	"net/http"
	"sync/atomic"
)

// oneConnection has requests wait for the first of them, at the start and when
// a connection was lost, so that they use its connection. Without it each opens
// one of its own and all but one are closed again unused: before an answer,
// net/http cannot know that the server speaks HTTP/2 (Go 1.26, transport.go). A
// TLS handshake is the most that a node's start costs an API server.
type oneConnection struct {
	next http.RoundTripper
	// connected says that the last request was answered.
	connected atomic.Bool
	// first is taken by the request that connects.
	first chan struct{}
}

func newOneConnection(next http.RoundTripper) *oneConnection {
	return &oneConnection{next: next, first: make(chan struct{}, 1)}
}

// RoundTrip implements http.RoundTripper.
func (o *oneConnection) RoundTrip(request *http.Request) (*http.Response, error) {
	if !o.connected.Load() {
		select {
		case <-request.Context().Done():
			return nil, request.Context().Err()
		case o.first <- struct{}{}:
		}
		if o.connected.Load() {
			<-o.first // Somebody has connected meanwhile.
		} else {
			defer func() { <-o.first }()
		}
	}
	answer, err := o.next.RoundTrip(request)
	o.connected.Store(err == nil)
	if err == nil {
		answer.Body = &body{answer.Body, o}
	}
	return answer, err
}

// body notices that a connection is lost, which only what was open on it does.
type body struct {
	io.ReadCloser
	of *oneConnection
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.of.connected.Store(false)
	}
	return n, err
}
