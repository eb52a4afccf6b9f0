package agent

import (
	"bufio"
	"bytes"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// FuzzHTTP holds that any request is answered, with a code that is known, and
// that none but GET and HEAD finds anything.
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
	handler := w.handler()
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

// statusOf has the text in each place that is shown.
func statusOf(text string) Status {
	since := time.Unix(1_000_000, 0)
	health := HealthStatus{State: sharing.HealthState("x" + text), Reason: "x" + text, Since: &since}
	text = "x" + text
	unit := UnitStatus{
		ID: text, Index: text, Profile: text, Resource: text, Replicas: 2, Health: health,
		Holders: []Holder{{Namespace: text, Pod: text, Container: text, Resource: text, Devices: []string{text}}},
	}
	partition := unit
	partition.Placement = &mig.Placement{Size: 1}
	ref := sharing.ProfileRef{Name: text, Source: text, Generation: text}
	return Status{
		Node: text, Version: text, Role: Role(text), Unready: []string{text + "!"}, Unread: text, Warnings: []string{text},
		Profile:   ProfileStatus{State: sharing.ProfileState(text), Since: since, Wanted: ref, Applied: &ref, Problem: text, Error: text},
		Resources: []ResourceStatus{{Name: text, Strategy: text, Refused: map[plugin.Reason]uint64{plugin.Reason(text): 1}}},
		GPUs:      []GPUStatus{{UUID: text, Model: text, Health: health, Use: &UseStatus{Throttled: []sharing.ThrottleReason{sharing.ThrottleReason(text)}, Unattributed: []UnattributedStatus{{Cause: sharing.UnattributedCause(text)}}}, Units: []UnitStatus{unit, partition}}},
		Layouts:   []sharing.BoardLayout{{GPU: text, Wanted: text, State: sharing.LayoutState(text), Reason: text}},
		Elsewhere: []UnitStatus{unit},
	}
}

// markup is the page's tags in their order, without those that only say where a
// line may end, and the number of its quotation marks.
func markup(page string) []string {
	tags := regexp.MustCompile(`</?[a-zA-Z!][^\s>]*`).FindAllString(page, -1)
	tags = slices.DeleteFunc(tags, func(tag string) bool { return tag == "<wbr" })
	return append(tags, strings.Repeat(`"`, strings.Count(page, `"`)))
}

// FuzzPage holds that no text, wherever it is shown, changes the page's markup,
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
		if page != Plain(page) {
			t.Errorf("%q has a browser do something", text)
		}
	})
}
