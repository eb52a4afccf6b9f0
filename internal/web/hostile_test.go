package web

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
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

// stuck is a prometheus.Collector that answers when it may.
type stuck struct{ may chan struct{} }

func (stuck) Describe(chan<- *prometheus.Desc) {}

func (s stuck) Collect(chan<- prometheus.Metric) { <-s.may }

// TestScrapesAreBounded checks that scrapers which come faster than they are
// answered do not pile up.
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

// slow is a client that reads nothing before it may.
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

// TestRequestsAreBounded checks that requests for the status, the page and the plan do not
// pile up, that those too many are told when to come again, and that others are not kept.
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

// statusOf has the text in each place that is shown.
func statusOf(text string) status.Status {
	since := time.Unix(1_000_000, 0)
	health := status.Health{State: sharing.HealthState("x" + text), Reason: "x" + text, Since: &since}
	text = "x" + text
	unit := status.Unit{
		ID: text, Index: text, Profile: text, Resource: text, Replicas: 2, Health: health,
		Holders: []status.Holder{{Namespace: text, Pod: text, Container: text, Resource: text, Devices: []string{text}}},
	}
	partition := unit
	partition.Placement = &mig.Placement{Size: 1}
	ref := nodereport.ProfileRef{Name: text, Source: text, Generation: text}
	return status.Status{
		Node: text, Version: text, Role: status.Role(text), Unready: []string{text + "!"}, Unread: text, Warnings: []string{text},
		Profile:   status.Profile{State: nodereport.ProfileState(text), Since: since, Wanted: ref, Applied: &ref, Problem: text, Error: text},
		Resources: []status.Resource{{Name: text, Strategy: text, Refused: map[plugin.RefusalReason]uint64{plugin.RefusalReason(text): 1}}},
		GPUs:      []status.GPU{{UUID: text, Model: text, Health: health, Use: &status.Use{Throttled: []sharing.ThrottleReason{sharing.ThrottleReason(text)}, Unattributed: []sharing.UnattributedUtilization{{Cause: sharing.UnattributedCause(text)}}}, Units: []status.Unit{unit, partition}}},
		Layouts:   []nodereport.GPULayout{{GPU: text, Wanted: text, State: nodereport.LayoutState(text), Reason: text}},
		Elsewhere: []status.Unit{unit},
	}
}

// markup is the page's tags in their order, without those that only say where a
// line may end, and the number of its quotation marks.
func markup(page string) []string {
	tags := regexp.MustCompile(`</?[a-zA-Z!][^\s>]*`).FindAllString(page, -1)
	tags = slices.DeleteFunc(tags, func(tag string) bool { return tag == "<wbr" })
	return append(tags, strings.Repeat(`"`, strings.Count(page, `"`)))
}

// FuzzPage checks that no text, wherever it is shown, changes the page's markup,
// or has a character in the page that a browser obeys.
func FuzzPage(f *testing.F) {
	for _, text := range []string{"", "plain", `"><script>alert(1)</script>`, "javascript:x", "{{.}}", "</style></title><!--", "&lt;&#60;", "\x1b[31m", "\u202e\u2066", "\xff\xfe", "a\x00b", "'`=<>/", "+ADw-script+AD4-"} {
		f.Add(text)
	}
	now := time.Unix(1_000_100, 0)
	view := newPage()
	drawn := func(text string) string {
		recorder := httptest.NewRecorder()
		view.write(recorder, statusOf(text), now)
		return recorder.Body.String()
	}
	plain := markup(drawn(""))
	f.Fuzz(func(t *testing.T, text string) {
		page := drawn(text)
		if diff := cmp.Diff(plain, markup(page)); diff != "" {
			t.Errorf("%q changes the markup: %s", text, diff)
		}
		if page != status.Plain(page) {
			t.Errorf("%q has a browser do something", text)
		}
	})
}
