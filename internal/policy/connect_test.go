package policy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// TestOneConnection: what asks at once at the start shares one connection, and
// what asks at once when that is lost shares another. A node costs one TLS
// handshake each time.
func TestOneConnection(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	var dials atomic.Int32
	api, err := NewAPI(&rest.Config{
		Host: server.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true},
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			dials.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, address)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	node := api.node("n1", nil, nil)
	askAtOnce := func() {
		var asking sync.WaitGroup
		for range 10 {
			asking.Go(func() { _, _ = node.list(t.Context(), metav1.ListOptions{}) })
		}
		asking.Wait()
	}
	askAtOnce()
	if got := dials.Load(); got != 1 {
		t.Errorf("%d connections, want 1", got)
	}
	watching, err := node.watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watching.Stop()
	server.CloseClientConnections()
	for range watching.ResultChan() { // until it is seen that it is lost
	}
	askAtOnce()
	if got := dials.Load(); got != 2 {
		t.Errorf("%d connections, want 2", got)
	}
}

// held is a server whose answers wait.
type held struct {
	asked  atomic.Int32
	answer chan error
}

func (h *held) RoundTrip(request *http.Request) (*http.Response, error) {
	h.asked.Add(1)
	select {
	case <-request.Context().Done():
		return nil, request.Context().Err()
	case err := <-h.answer:
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(""))}, err
	}
}

// await waits until so many were asked.
func (h *held) await(t *testing.T, requests int32) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for h.asked.Load() < requests {
		if time.Now().After(deadline) {
			t.Fatalf("%d requests, want %d", h.asked.Load(), requests)
		}
		<-time.After(time.Millisecond)
	}
}

func ask(ctx context.Context, through http.RoundTripper) <-chan error {
	ended := make(chan error, 1)
	go func() {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1", nil)
		if err == nil {
			var answer *http.Response
			if answer, err = through.RoundTrip(request); err == nil {
				err = answer.Body.Close()
			}
		}
		ended <- err
	}()
	return ended
}

// TestOneConnectionIsNoQueue: requests wait for the first one only, not for
// longer than they are patient, and one after another while nobody answers.
func TestOneConnectionIsNoQueue(t *testing.T) {
	server := &held{answer: make(chan error)}
	one := newOneConnection(server)
	first := ask(t.Context(), one)
	server.answer <- errors.New("away")
	if err := <-first; err == nil {
		t.Fatal("answered")
	}
	second, after := ask(t.Context(), one), ask(t.Context(), one)
	server.await(t, 2)
	for range 50 { // Nothing tells that a request waits.
		if got := server.asked.Load(); got != 2 {
			t.Fatalf("%d asked while nobody has connected", got)
		}
		<-time.After(time.Millisecond)
	}
	server.answer <- nil
	server.answer <- nil
	for _, ended := range []<-chan error{second, after} {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	// Connected: these are asked at once.
	third, fourth := ask(t.Context(), one), ask(t.Context(), one)
	server.await(t, 5)
	server.answer <- nil
	server.answer <- errors.New("away")
	if first, second := <-third, <-fourth; (first == nil) == (second == nil) {
		t.Errorf("answered %v and %v", first, second)
	}

	// One that hangs holds up nobody who gives up.
	one = newOneConnection(server)
	hanging, stop := context.WithCancel(t.Context())
	first = ask(hanging, one)
	server.await(t, 6)
	impatient, cancel := context.WithCancel(t.Context())
	second = ask(impatient, one)
	cancel()
	if err := <-second; !errors.Is(err, context.Canceled) {
		t.Errorf("gave up with %v", err)
	}
	if got := server.asked.Load(); got != 6 {
		t.Errorf("%d asked", got)
	}
	stop()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}
