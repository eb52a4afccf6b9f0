package web

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// handlerOf answers for the node.
func handlerOf(node Node) http.Handler {
	return New(Options{Node: node, Logger: slog.New(slog.DiscardHandler)}).Handler()
}

func TestMethods(t *testing.T) {
	t.Parallel()
	handler := handlerOf(shown())
	ask := func(method, path string) *httptest.ResponseRecorder {
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, httptest.NewRequest(method, path, nil))
		return recorder
	}
	for _, path := range []string{"/metrics", "/status", "/api/v1/status", "/healthz", "/plan"} {
		if code := ask(http.MethodHead, path).Code; code != http.StatusOK {
			t.Errorf("HEAD %s: %d", path, code)
		}
		for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
			if code := ask(method, path).Code; code != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d", method, path, code)
			}
		}
	}
	if answer := ask(http.MethodGet, "/"); answer.Code != http.StatusFound || answer.Header().Get("Location") != "/status" {
		t.Errorf("GET /: %d to %q", answer.Code, answer.Header().Get("Location"))
	}
	for path, want := range map[string]int{"/readyz": http.StatusMethodNotAllowed, "/sim/xid?gpu=0&code=79": http.StatusNotFound} {
		if code := ask(http.MethodPost, path).Code; code != want {
			t.Errorf("POST %s: %d, want %d", path, code, want)
		}
	}
	if code := ask(http.MethodGet, "/other").Code; code != http.StatusNotFound {
		t.Errorf("GET /other: %d", code)
	}
}

// stuck is a prometheus.Collector that blocks until it may answer.
type stuck struct{ may chan struct{} }

func (stuck) Describe(chan<- *prometheus.Desc) {}

func (s stuck) Collect(chan<- prometheus.Metric) { <-s.may }

// TestScrapesAreBounded checks that scrapes that come faster than they are answered do not pile up.
func TestScrapesAreBounded(t *testing.T) {
	t.Parallel()
	may := make(chan struct{})
	node := shown()
	node.Metrics = func() *prometheus.Registry {
		registry := prometheus.NewRegistry()
		registry.MustRegister(stuck{may})
		return registry
	}
	handler := handlerOf(node)
	const scrapers = maxRequests + 5
	codes := make(chan int, scrapers)
	for range scrapers {
		go func() {
			recorder := httptest.NewRecorder()
			handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
			codes <- recorder.Code
		}()
	}
	for range scrapers - maxRequests {
		if code := <-codes; code != http.StatusServiceUnavailable { // One too many that has to wait hangs here.
			t.Errorf("answer %d to one too many", code)
		}
	}
	close(may)
	for range maxRequests {
		if code := <-codes; code != http.StatusOK {
			t.Errorf("answer %d", code)
		}
	}
}

// slow is a client that reads only when it may.
type slow struct {
	*httptest.ResponseRecorder
	answered func()
	may      chan struct{}
}

func (s slow) Write(data []byte) (int, error) {
	s.answered()
	<-s.may
	return s.ResponseRecorder.Write(data)
}

func (s slow) WriteString(text string) (int, error) { return s.Write([]byte(text)) }

// TestRequestsAreBounded checks that requests for the status, the page and the plan do not pile up, that excess
// ones get a Retry-After, and that other paths are not affected.
func TestRequestsAreBounded(t *testing.T) {
	t.Parallel()
	paths := []string{"/status", "/api/v1/status", "/plan"}
	for i, path := range paths {
		handler := handlerOf(shown())
		may, ended := make(chan struct{}), make(chan int)
		var answered sync.WaitGroup
		answered.Add(maxRequests)
		for range maxRequests {
			go func() {
				client := slow{httptest.NewRecorder(), sync.OnceFunc(answered.Done), may}
				handler.ServeHTTP(client, httptest.NewRequest(http.MethodGet, path, nil))
				ended <- client.Code
			}()
		}
		answered.Wait()
		get := func(path string) *httptest.ResponseRecorder {
			recorder := httptest.NewRecorder()
			handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
			return recorder
		}
		if refused := get(path); refused.Code != http.StatusServiceUnavailable || refused.Header().Get("Retry-After") == "" {
			t.Errorf("%s: one too many is answered %d, Retry-After %q", path, refused.Code, refused.Header().Get("Retry-After"))
		}
		for _, other := range []string{"/healthz", "/metrics", paths[(i+1)%len(paths)]} {
			if code := get(other).Code; code != http.StatusOK {
				t.Errorf("%s while %s is busy: %d", other, path, code)
			}
		}
		close(may)
		for range maxRequests {
			if code := <-ended; code != http.StatusOK {
				t.Errorf("%s: %d", path, code)
			}
		}
		if code := get(path).Code; code != http.StatusOK {
			t.Errorf("%s afterwards: %d", path, code)
		}
	}
}
