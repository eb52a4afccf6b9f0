package kube

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/test/await"
)

var oneNode = Query{Resource: "nodes", Selector: ByName("n1"), MetadataOnly: true}

// TestSharedConnection checks that concurrent requests share one connection, at the start and after the connection
// is lost, so that a node costs one TLS handshake each time.
func TestSharedConnection(t *testing.T) {
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
	api, err := NewClient(&rest.Config{
		Host: server.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true},
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			dials.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, address)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	node := api.watcher(oneNode, nil)
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

// heldServer is a server that delays its answers.
type heldServer struct {
	asked  atomic.Int32
	answer chan error
}

func (h *heldServer) RoundTrip(request *http.Request) (*http.Response, error) {
	h.asked.Add(1)
	select {
	case <-request.Context().Done():
		return nil, request.Context().Err()
	case err := <-h.answer:
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(""))}, err
	}
}

// expect checks the number of requests once nothing more can happen.
func (h *heldServer) expect(t *testing.T, requests int32) {
	t.Helper()
	synctest.Wait()
	if got := h.asked.Load(); got != requests {
		t.Fatalf("%d requests, want %d", got, requests)
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

// TestSharedConnectionIsNoQueue checks that requests wait only for the first one, at most for their own timeout,
// and not one after another while the server does not answer.
func TestSharedConnectionIsNoQueue(t *testing.T) { synctest.Test(t, testSharedConnectionIsNoQueue) }

func testSharedConnectionIsNoQueue(t *testing.T) {
	server := &heldServer{answer: make(chan error)}
	one := newSharedConnection(server)
	first := ask(t.Context(), one)
	server.answer <- errors.New("away")
	if err := <-first; err == nil {
		t.Fatal("answered")
	}
	second, after := ask(t.Context(), one), ask(t.Context(), one)
	server.expect(t, 2) // One has asked, and the other waits until it has connected.
	server.answer <- nil
	server.answer <- nil
	for _, ended := range []<-chan error{second, after} {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	// Connected: these are sent at once.
	third, fourth := ask(t.Context(), one), ask(t.Context(), one)
	server.expect(t, 5)
	server.answer <- nil
	server.answer <- errors.New("away")
	if first, second := <-third, <-fourth; (first == nil) == (second == nil) {
		t.Errorf("answered %v and %v", first, second)
	}

	// A hanging request does not delay one that gives up.
	one = newSharedConnection(server)
	hanging, stop := context.WithCancel(t.Context())
	first = ask(hanging, one)
	server.expect(t, 6)
	impatient, cancel := context.WithCancel(t.Context())
	second = ask(impatient, one)
	server.expect(t, 6)
	cancel()
	if err := <-second; !errors.Is(err, context.Canceled) {
		t.Errorf("gave up with %v", err)
	}
	server.expect(t, 6)
	stop()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}

// TestEndlessAnswer checks that the client gives up an endless answer, and uses no more memory for it than for the
// longest allowed answer.
func TestEndlessAnswer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		block := bytes.Repeat([]byte("x"), 1<<20)
		for r.Context().Err() == nil {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	}))
	defer server.Close()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(`{kind: Config, apiVersion: v1, current-context: c,
contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u, user: {}}],
clusters: [{name: c, cluster: {server: "`+server.URL+`"}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	config, err := RESTConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	api, err := NewClient(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	pods := api.watcher(Query{Resource: "pods", Selector: ByName("n")}, nil)
	if _, err := pods.list(ctx, metav1.ListOptions{}); err == nil || !strings.Contains(err.Error(), "longer than 33554432 bytes") {
		t.Errorf("got %v", err)
	}
}

// TestInsist checks that a refused request is repeated when the server allows it, but not by all nodes at once, and
// is given up in time.
func TestInsist(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		took := map[time.Duration]bool{}
		for range 10 {
			refusals := 2
			api := refusing(t, func() bool { refusals--; return refusals >= 0 })
			began := time.Now()
			if err := api.Insist(t.Context(), api.Get().Resource("nodes").Name("n1")).Error(); err != nil {
				t.Error(err)
			}
			waited := time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
			took[waited] = true
			if waited < 6*time.Second || waited > 12*time.Second {
				t.Errorf("waited %s for a server that asks for 3 s twice", waited)
			}
		}
		if len(took) == 1 {
			t.Errorf("all nodes ask again after %v", took)
		}
		api := refusing(t, func() bool { return true })
		began := time.Now()
		err := api.Insist(t.Context(), api.Get().Resource("nodes").Name("n1")).Error()
		waited := time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if !apierrors.IsTooManyRequests(err) || waited != api.Timeout {
			t.Errorf("gave up after %s with %v", waited, err)
		}
	})
}

type roundTripper func(*http.Request) *http.Response

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r), nil }

// refusing is a client of a server that asks for 3 s when it refuses.
func refusing(t *testing.T, refuses func() bool) *Client {
	t.Helper()
	api, err := NewClient(&rest.Config{Host: "http://in-memory", Transport: roundTripper(func(r *http.Request) *http.Response {
		answer := httptest.NewRecorder()
		answer.Header().Set("Content-Type", "application/json")
		if refuses() {
			answer.Header().Set("Retry-After", "3")
			answer.WriteHeader(http.StatusTooManyRequests)
		}
		return answer.Result()
	})})
	if err != nil {
		t.Fatal(err)
	}
	return api
}

// TestRequestsAreMadeOnce checks that a server that asks for time gets the request once, not again from the library
// after exactly that time.
func TestRequestsAreMadeOnce(t *testing.T) {
	var asked, metadata atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if strings.Contains(r.Header.Get("Accept"), "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata") {
			metadata.Add(1)
		}
		w.Header().Set("Retry-After", "1")
		http.Error(w, "too many requests", http.StatusTooManyRequests)
	}))
	defer server.Close()
	api, err := NewClient(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	watchers := map[string]*watcher{
		"node":      api.watcher(oneNode, nil),
		"ConfigMap": api.watcher(Query{Resource: "configmaps", Namespace: "gpu", Selector: ByName("profiles")}, nil),
	}
	for name, w := range watchers {
		requests := map[string]func() error{
			"list":  func() error { _, err := w.list(t.Context(), metav1.ListOptions{}); return err },
			"watch": func() error { _, err := w.watch(t.Context(), metav1.ListOptions{ResourceVersion: "1"}); return err },
		}
		for kind, request := range requests {
			t.Run(name+" "+kind, func(t *testing.T) {
				asked.Store(0)
				err := request()
				if seconds, ok := apierrors.SuggestsClientDelay(err); !ok || seconds != 1 {
					t.Errorf("the error %v asks for %d s, %t", err, seconds, ok)
				}
				if got := asked.Load(); got != 1 {
					t.Errorf("asked %d times", got)
				}
			})
		}
	}
	if got := metadata.Load(); got != 2 {
		t.Errorf("%d requests are for metadata alone, want those of the Node", got)
	}
}
