package web

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// TestControlBodiesAreBounded checks that no request on the control socket can exhaust the node's memory.
func TestControlBodiesAreBounded(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		ended <- ServeControl(ctx, listener, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, err := io.Copy(io.Discard, r.Body)
			if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge != strings.HasSuffix(r.URL.Path, "large") {
				t.Errorf("%s: %v", r.URL.Path, err)
			}
		}))
	}()
	for path, size := range map[string]int{"/largest": maxControlBody, "/too-large": maxControlBody + 1} {
		answer, err := http.Post("http://"+listener.Addr().String()+path, "text/plain", strings.NewReader(strings.Repeat("x", size)))
		if err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
	}
	cancel()
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("it ends with %v", err)
	}
}
