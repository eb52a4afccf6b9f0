package agent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// ask returns the agent's answer.
func ask(a *agent, method, path string) *httptest.ResponseRecorder {
	recorder := httptest.NewRecorder()
	a.web.Handler().ServeHTTP(recorder, httptest.NewRequest(method, path, nil))
	return recorder
}

// readable fails if one of the three full outputs cannot be read. It returns the number of series with the label
// pod.
func readable(t *testing.T, a *agent) (pods int) {
	t.Helper()
	scrape := ask(a, http.MethodGet, "/metrics")
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(scrape.Body)
	if err != nil || scrape.Code != http.StatusOK {
		t.Errorf("scrape: %d, %v", scrape.Code, err)
	}
	for _, metric := range families["virgate_allocation_info"].GetMetric() {
		if len(metric.Label) == 7 {
			pods++
		}
	}
	if families["virgate_build_info"] == nil {
		t.Error("the scrape lacks the program itself")
	}
	var status status.Status
	if body := ask(a, http.MethodGet, "/api/v1/status").Body.Bytes(); json.Unmarshal(body, &status) != nil {
		t.Errorf("status: %s", body)
	}
	page := ask(a, http.MethodGet, "/status")
	if body := page.Body.String(); page.Code != http.StatusOK || !strings.Contains(body, "</html>") || strings.Count(body, "<script") != 1 { // Its own.
		t.Errorf("page: %d %s", page.Code, body)
	}
	return pods
}

func TestHostileNames(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "t4", 8)
	for _, name := range []string{"</script><script>", "a\n# TYPE x counter", `"} 1`, "\xff", "\xfe\xff", "\x00", strings.Repeat("long", 10_000)} {
		w.pod("pod", 0, mebibyte, 1)
		last := &w.holders.held[len(w.holders.held)-1]
		last.Namespace, last.Pod, last.Container = name, name, name
	}
	w.holders.held = append(w.holders.held, w.holders.held...) // Everything twice.
	s := *w.state.Load()
	s.gpus[0].Model, s.gpus[0].Health = "\xffTesla", sharing.Faulty("\xff<script>")
	w.state.Store(&s)
	w.sampleNow()
	if pods := readable(t, w.agent); pods != 7 {
		t.Errorf("%d devices shown as held, want 7", pods)
	}
	// Two of the names look the same once invalid UTF-8 is replaced: one of them is lost, nothing else.
	text := ask(w.agent, http.MethodGet, "/metrics").Body.String()
	for name, want := range map[string]int{"virgate_unit_sharers": 1, "virgate_container_processes": 6} {
		if got := strings.Count(text, "\n"+name+"{"); got != want {
			t.Errorf("%d series of %s, want %d", got, name, want)
		}
	}
	if !regexp.MustCompile(`\nvirgate_unit_sharers\{[^}]*\} 7\n`).MatchString(text) {
		t.Error("not seven sharers")
	}
}

// TestReadableInEveryRole checks that the outputs can be read in every role.
func TestReadableInEveryRole(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		role   status.Role
		change func(a *agent)
	}{
		{status.RoleStarting, func(*agent) {}},
		{status.RoleStandby, func(a *agent) { a.standby.Store(true) }},
		{status.RoleServing, func(a *agent) { a.serving.Store(true) }},
		{status.RoleDraining, func(a *agent) { a.serving.Store(true); a.draining.Store(true) }},
	} {
		w := newWatch(t, "t4", 2)
		test.change(w.agent)
		readable(t, w.agent)
		if page := ask(w.agent, http.MethodGet, "/status").Body.String(); !strings.Contains(page, ">"+string(test.role)+"<") {
			t.Errorf("the page does not say %s", test.role)
		}
		readable(t, newAgent(w.Options))
	}
}

// TestReadableWhileItChanges is for the race detector.
func TestReadableWhileItChanges(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "l40sx8", 4)
	w.pod("one", 0, mebibyte, 10)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			for {
				readable(t, w.agent)
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for replicas := range 10 {
		gpus := w.gpus[:1+replicas%8] // GPUs that are measured are gone, and come back.
		w.state.Store(&state{gpus: gpus, plan: sharing.NewPlan(gpus, profile(1+replicas)), planned: true})
		w.sampleNow()
	}
	close(stop)
	readers.Wait()
}

// FuzzHTTP checks that every request gets a known status code, and that only GET and HEAD get 200.
func FuzzHTTP(f *testing.F) {
	for _, request := range []string{
		"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "GET /status HTTP/1.0\r\n\r\n", "HEAD /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip, zstd\r\n\r\n",
		"GET /metrics?name[]=a&name[]=\xff HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1\r\n\r\n",
		"POST /api/v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", "GET //status/../plan HTTP/1.1\r\nHost: x\r\n\r\n", "GET /%2e%2e/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
		"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", "GET http://evil/readyz HTTP/1.1\r\nHost: evil\r\n\r\n", "GET /debug/pprof/ HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		f.Add([]byte(request))
	}
	w := newWatch(f, "t4", 4)
	w.pod("pod", 0, mebibyte, 10)
	w.sampleNow()
	handler := w.web.Handler()
	f.Fuzz(func(t *testing.T, data []byte) {
		request, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(data)))
		if err != nil {
			return // net/http's server answers it.
		}
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		switch recorder.Code {
		case http.StatusOK:
			if request.Method != http.MethodGet && request.Method != http.MethodHead {
				t.Errorf("%s %s is answered", request.Method, request.URL)
			}
		case http.StatusFound, http.StatusMovedPermanently, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
			if location := recorder.Header().Get("Location"); !strings.HasPrefix(location, "/") || strings.HasPrefix(location, "//") {
				t.Errorf("%s %s leads away: %q", request.Method, request.URL, location)
			}
		case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotAcceptable, http.StatusServiceUnavailable:
		default:
			t.Errorf("%s %s is answered %d", request.Method, request.URL, recorder.Code)
		}
	})
}
