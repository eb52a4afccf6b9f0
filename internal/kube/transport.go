package kube

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
)

// maxResponse limits a response, in bytes. An object has at most 1.5 MiB (etcd,
// --max-request-bytes), and the largest list is the pods of one node. A watch has no limit;
// client-go limits each of its events.
const maxResponse = 32 << 20

// responseLimit turns longer responses into errors, so that a server or proxy gone mad does not use
// up the node's memory.
type responseLimit struct{ next http.RoundTripper }

func (l responseLimit) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := l.next.RoundTrip(request)
	if err == nil && request.URL.Query().Get("watch") == "" {
		response.Body = &limitedBody{ReadCloser: response.Body, left: maxResponse}
	}
	return response, err
}

type limitedBody struct {
	io.ReadCloser
	left int
}

func (b *limitedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("the API server's answer is longer than %d bytes", maxResponse)
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// sharedConnection makes requests wait for the first one, at the start and after a lost connection,
// so that they share its connection. Otherwise each would open its own, and all but one would be
// closed unused: before a response, net/http cannot know that the server speaks HTTP/2 (Go 1.26,
// transport.go). A TLS handshake is the largest cost of a node's start for an API server.
type sharedConnection struct {
	next http.RoundTripper
	// connected is true if the last request was answered.
	connected atomic.Bool
	// first is held by the request that connects.
	first chan struct{}
}

func newSharedConnection(next http.RoundTripper) *sharedConnection {
	return &sharedConnection{next: next, first: make(chan struct{}, 1)}
}

func (s *sharedConnection) RoundTrip(request *http.Request) (*http.Response, error) {
	if !s.connected.Load() {
		select {
		case <-request.Context().Done():
			return nil, request.Context().Err()
		case s.first <- struct{}{}:
		}
		if s.connected.Load() {
			<-s.first // Another request has connected meanwhile.
		} else {
			defer func() { <-s.first }()
		}
	}
	response, err := s.next.RoundTrip(request)
	s.connected.Store(err == nil)
	if err == nil {
		response.Body = &connectionBody{response.Body, s}
	}
	return response, err
}

// connectionBody notices a lost connection, which only open responses report.
type connectionBody struct {
	io.ReadCloser
	connection *sharedConnection
}

func (b *connectionBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.connection.connected.Store(false)
	}
	return n, err
}
