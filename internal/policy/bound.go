package policy

import (
	"fmt"
	"io"
	"net/http"
)

// longestAnswer is the size in bytes of the longest answer that is read. An
// object has 1.5 MiB at most (etcd, --max-request-bytes), and the most that is
// listed are the pods of one node. A watch has no end; client-go bounds each of
// its events.
const longestAnswer = 32 << 20

// bounded has answers that are longer be errors, so that a server or a proxy
// that has gone mad does not take the node's memory.
type bounded struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (b bounded) RoundTrip(request *http.Request) (*http.Response, error) {
	answer, err := b.next.RoundTrip(request)
	if err == nil && request.URL.Query().Get("watch") == "" {
		answer.Body = &boundedBody{ReadCloser: answer.Body, left: longestAnswer}
	}
	return answer, err
}

type boundedBody struct {
	io.ReadCloser
	left int
}

// Read implements io.Reader.
func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("the API server's answer is longer than %d bytes", longestAnswer)
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
