package cluster

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/page"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// served is a page of snapshots that the test sets.
type served struct {
	t        *testing.T
	snapshot *Snapshot
	page     *Page
	handler  http.Handler
}

func serve(t *testing.T, snapshot *Snapshot) *served {
	s := &served{t: t, snapshot: snapshot}
	s.page = NewPage(func() (*Snapshot, <-chan struct{}) { return s.snapshot, nil })
	s.handler = s.page.Handler("secret")
	return s
}

// ask sends a request with the headers, which are names and values in turn.
func (s *served) ask(method, path string, headers ...string) *http.Response {
	s.t.Helper()
	r := httptest.NewRequestWithContext(s.t.Context(), method, "/secret"+path, nil)
	r.Host = "localhost:8080"
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	s.handler.ServeHTTP(w, r)
	return w.Result()
}

func (s *served) text(path string, headers ...string) string {
	s.t.Helper()
	answer := s.ask(http.MethodGet, path, headers...)
	body, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode >= 300 {
		s.t.Fatalf("%s: %s %v %s", path, answer.Status, err, body)
	}
	return string(body)
}

// nodes is a snapshot of nodes with these names, with one GPU each.
func nodes(names ...string) *Snapshot {
	s := &Snapshot{At: now}
	for _, name := range names {
		s.Nodes = append(s.Nodes, Node{Name: name, GPUs: 1, State: "applied", Capacity: gpu(4), Allocatable: gpu(3)})
	}
	return s
}

func TestServeRefuses(t *testing.T) {
	s := serve(t, nodes("n1"))
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodPatch} {
		for _, path := range []string{"/", "/tiles?since=0", "/nodes/n1", "/api/v1/cluster", "/page.js", "/cluster.js"} {
			if answer := s.ask(method, path); answer.StatusCode != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %s", method, path, answer.Status)
			}
		}
	}
	for path, want := range map[string]int{"/nodes/n2": 404, "/x": 404, "/tiles": 400, "/tiles?since=x": 400, "/": 200, "/nodes/n1": 200, "/page.css": 200, "/cluster.js": 200, "/cluster.html": 404} {
		answer := s.ask(http.MethodHead, path)
		if answer.StatusCode != want {
			t.Errorf("%s: %s, want %d", path, answer.Status, want)
		}
		if policy := answer.Header.Get("Content-Security-Policy"); !strings.HasPrefix(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") || answer.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %v", path, answer.Header)
		}
	}
	// A foreign name for 127.0.0.1 gets nothing, nor does a request without the whole address.
	for _, test := range []struct {
		host, path string
		want       int
	}{
		{"localhost:99", "/secret/", 200},
		{"localhost", "/secret/", 200},
		{"127.0.0.1:8080", "/secret/", 200},
		{"[::1]:8080", "/secret/", 200},
		{"[::1]", "/secret/", 200},
		{"evil.example:8080", "/secret/", 421},
		{"localhost.evil.example", "/secret/", 421},
		{"10.0.0.1:8080", "/secret/", 421},
		{"", "/secret/", 421},
		{"localhost", "/", 403},
		{"localhost", "/api/v1/cluster", 403},
		{"localhost", "//api/v1/cluster", 403},
		{"localhost", "/nodes/n1", 403},
		{"localhost", "/cluster.js", 403},
		{"localhost", "/secre/api/v1/cluster", 403},
		{"localhost", "/secret2/api/v1/cluster", 403},
		{"localhost", "/./secret/../api/v1/cluster", 403},
		{"localhost", "/?secret", 403},
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, test.path, nil)
		r.Host = test.host
		w := httptest.NewRecorder()
		s.handler.ServeHTTP(w, r)
		if w.Code != test.want || w.Code != 200 && strings.Contains(w.Body.String(), "n1") {
			t.Errorf("%s of %q: %d, want %d", test.path, test.host, w.Code, test.want)
		}
	}
}

// TestServeJSON checks that the JSON has the same names as -o json, is compressed, and has nothing twice.
func TestServeJSON(t *testing.T) {
	s := serve(t, nil)
	if answer := s.ask(http.MethodGet, "/api/v1/cluster"); answer.StatusCode != http.StatusServiceUnavailable {
		t.Error(answer.Status)
	}
	if text := s.text("/"); !strings.Contains(text, "has not answered yet") {
		t.Error(text)
	}
	s.snapshot = nodes("n1", "n2")
	answer := s.ask(http.MethodGet, "/api/v1/cluster", "Accept-Encoding", "gzip")
	packed, err := gzip.NewReader(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	var got View
	if err := json.NewDecoder(packed).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(NewView(*s.snapshot), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	tag := answer.Header.Get("ETag")
	if again := s.ask(http.MethodGet, "/api/v1/cluster", "If-None-Match", tag); again.StatusCode != http.StatusNotModified {
		t.Errorf("%s with %s", again.Status, tag)
	}
	s.snapshot = nodes("n1")
	if text := s.text("/api/v1/cluster", "If-None-Match", tag); strings.Contains(text, "n2") {
		t.Error(text)
	}
}

// TestTiles checks that the page gets the changed tiles, or all tiles if the changes are unknown.
func TestTiles(t *testing.T) {
	s := serve(t, nodes("n1", "n2", "n3"))
	version := func() string { return strconv.FormatInt(s.page.version, 10) }
	sent := func(since string) (names string) {
		t.Helper()
		answer := s.ask(http.MethodGet, "/tiles?since="+since)
		body, _ := io.ReadAll(answer.Body)
		if answer.StatusCode == http.StatusNoContent {
			return "none"
		}
		if answer.Header.Get("Virgate-Whole") == "true" {
			names = "whole"
		}
		for _, name := range []string{"n1", "n2", "n3", "n4"} {
			if strings.Contains(string(body), `" data-name="`+name+`"`) {
				names += " " + name
			}
			if strings.Contains(string(body), `data-gone="`+name+`"`) {
				names += " -" + name
			}
		}
		return strings.TrimSpace(names)
	}
	check := func(what, since, want string) {
		t.Helper()
		if got := sent(since); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	check("a page of before", "1", "whole n1 n2 n3")
	first := version()
	check("nothing new", first, "none")
	check("a version of another process", first+"0", "whole n1 n2 n3")

	s.snapshot = nodes("n1", "n2", "n3")
	s.snapshot.Nodes[0].Condition = condition("True", "Serving", 0)
	check("a heartbeat", first, "")
	second := version()

	s.snapshot = nodes("n1", "n3", "n4")
	s.snapshot.Nodes[1].State = "rejected"
	check("one changed, one gone, one new", second, "-n2 n3 n4")
	check("the same from the start", first, "-n2 n3 n4")

	s.snapshot = nodes("n1", "n2", "n3")
	check("one is back", second, "n2 -n2 n3 -n4")
	last := version()
	for range maxGone + 1 { // More than is remembered.
		s.snapshot = nodes()
		_ = sent(version())
		s.snapshot = nodes("n1")
		_ = sent(version())
	}
	check("a page that slept", last, "whole n1")
	if len(s.page.gone) > maxGone {
		t.Errorf("%d are remembered", len(s.page.gone))
	}
}

// TestHostileNames checks that anything that others write to a Node, a pod or a status page is shown as text.
func TestHostileNames(t *testing.T) {
	const evil = `"'><script>alert(1)</script><img src=x onerror=alert(1)></title></svg>&lt;b&gt;` + "\u202e\x1b[31m"
	s := serve(t, &Snapshot{
		At: now, Lost: evil,
		Nodes: []Node{{
			Name: evil, Wanted: evil, State: evil, Applied: evil, Source: evil, Generation: evil, Layout: evil, LayoutState: evil, Model: evil, NotReady: evil,
			Capacity: map[string]int64{evil: 2}, Allocatable: map[string]int64{evil: 1},
		}, {Name: "n2"}},
		Pods: []Pod{pod(evil, evil, evil, evil), {Namespace: evil, Name: evil, Node: "n2", StatusPort: 1}},
		Statuses: map[string]Status{evil: {Unread: evil}, "n2": {Page: &status.Status{
			Profile: status.Profile{Problem: evil}, Unread: evil,
			GPUs: []status.GPU{{UUID: evil, Model: evil, Units: []status.Unit{{
				ID: evil, Index: evil, Profile: evil, Resource: evil, Replicas: 2, Placement: &mig.Placement{Start: 0, Size: 1},
				Health: status.Health{State: sharing.HealthState(evil), Reason: evil}, Holders: []status.Holder{{Namespace: evil, Pod: evil, Container: evil, Devices: []string{"1"}}},
			}}}},
		}}},
	})
	for _, path := range []string{"/", "/tiles?since=1", "/nodes/n2"} {
		text := s.text(path)
		for _, never := range []string{"<script>", "<img", "\u202e", "\x1b", "style=", "javascript:", " onerror=alert(1)></title></svg>&lt;b"} {
			if strings.Contains(text, never) {
				t.Errorf("%s has %q:\n%s", path, never, text)
			}
		}
		if !strings.Contains(text, "&lt;script&gt;alert(1)") {
			t.Errorf("%s lacks the names:\n%s", path, text)
		}
	}
}

// TestTileView checks the text for filters, the boards and the colour of a node.
func TestTileView(t *testing.T) {
	gpus := []GPUView{
		{Index: "0", ID: "a", Replicas: 4, Held: 3, Health: "healthy", Holders: []HolderView{{"x", "p", "c", 1}, {"y", "Q", "c", 2}}},
		{Index: "1:0", ID: "b", Profile: "3g.20gb", Placement: &mig.Placement{Start: 4, Size: 4}, Slots: 8, Replicas: 1, Health: "unhealthy"},
		{Index: "1:1", ID: "c", Profile: "1g.5gb", Placement: &mig.Placement{Start: 0, Size: 1}, Slots: 8, Replicas: 1, Held: 1, Health: "suspect", Holders: []HolderView{{"x", "r", "c", 1}}},
		{Index: "2", ID: "d", Replicas: 100, Held: 0, Health: "Healthy"},
	}
	got := newTileView(NodeView{Name: "n", State: "pending", Resources: []ResourceView{{"r", 3, 0, new(int64(1)), new(int64(2))}}}, gpus, page.Colours{})
	if got.States != "unhealthy pending free" || got.Edge != "bad-edge" || !strings.Contains(got.Find, "y/q") {
		t.Errorf("states %q, edge %q, find %q", got.States, got.Edge, got.Find)
	}
	var boards []string
	for _, b := range got.Boards {
		boards = append(boards, fmt.Sprint(b.Label, " ", len(b.Boxes)))
	}
	if diff := cmp.Diff([]string{"0 1", "1 2", "2 1"}, boards); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, test := range []struct{ state, problem, want string }{
		{"applied", "", "good-edge"}, {"applied", "not ready", "bad-edge"}, {"rejected", "", "bad-edge"}, {"switching", "", "warn-edge"}, {"", "", ""},
	} {
		node := NodeView{Name: "n", State: nodereport.ProfileState(test.state), Problem: test.problem}
		if got := newTileView(node, nil, page.Colours{}).Edge; got != test.want {
			t.Errorf("%+v: %q", test, got)
		}
	}
}

// TestNotReadable checks that an unreadable status page is noted and is no fault, and that there is no note before
// the node was asked.
func TestNotReadable(t *testing.T) {
	const refused = "you may not"
	all := nodes("n1")
	all.StatusUnread = refused
	one := nodes("n1")
	one.Statuses = map[string]Status{"n1": {Unread: refused}}
	early := nodes("n1")
	early.Statuses = map[string]Status{"n1": {Unread: notYet}}
	for name, snapshot := range map[string]*Snapshot{"all": all, "one": one, "early": early} {
		snapshot.Nodes[0].Allocatable = snapshot.Nodes[0].Capacity
		s := serve(t, nil)
		_ = s.text("/")
		s.snapshot = snapshot
		_, text, _ := strings.Cut(s.text("/"), "<main")
		text, _, _ = strings.Cut(text, "</main>")
		if says := strings.Contains(text, `<p class="soft">not readable: `+refused); says != (name != "early") || strings.Contains(text, "not read yet") {
			t.Errorf("%s: %s", name, text)
		}
		if strings.Contains(strings.ReplaceAll(text, "badge", ""), "bad") || !strings.Contains(text, "good-edge") {
			t.Errorf("%s is shown as a fault: %s", name, text)
		}
	}
}

// TestNodePage checks that a node's page, if it can be read, is the page that the node serves itself.
func TestNodePage(t *testing.T) {
	snapshot := nodes("n1", "n2")
	snapshot.Nodes[1].Capacity, snapshot.Pods = gpu(4), []Pod{pod("x", "p", "n2", "GPU-1::0")}
	snapshot.Statuses = map[string]Status{"n1": {Page: &status.Status{HoldersKnown: true, Resources: []status.Resource{{Name: "r", Refused: map[plugin.RefusalReason]uint64{plugin.TooMany: 2}}}, GPUs: []status.GPU{{
		UUID: "GPU-0", Model: "T4", Health: status.Health{State: sharing.Unhealthy, Reason: "XID 79"}, Units: []status.Unit{{ID: "GPU-0", Replicas: 2, Holders: []status.Holder{{Namespace: "team", Pod: "train", Devices: []string{"1"}}}}},
	}}}}}
	s := serve(t, snapshot)
	for path, wanted := range map[string][]string{
		"/nodes/n1": {"<h1>n1</h1>", "2 × more than one share", ">XID 79</a>", "team/<strong>train</strong>", "</svg> team</span>", `href="../page.css"`, `src="../page.js"`, `data-every="`},
		"/nodes/n2": {"<h1>n2</h1>", "GPUs that pods hold", "x/<strong>p</strong>"},
	} {
		text := s.text(path)
		for _, want := range wanted {
			if !strings.Contains(text, want) {
				t.Errorf("%s lacks %q:\n%s", path, want, text)
			}
		}
	}
	if text := s.text("/"); !strings.Contains(text, "</svg> team</span>") || !strings.Contains(text, "</svg> x</span>") {
		t.Errorf("no legend:\n%s", text)
	}
}

// TestHead checks the totals of a resource, and how many nodes each filter finds.
func TestHead(t *testing.T) {
	s := nodes("n1", "n2")
	s.Nodes[1].State, s.Pods = "rejected", []Pod{pod("x", "p", "n1")}
	head := newHeadView(NewView(*s), 1, true, page.Colours{})
	if diff := cmp.Diff([]ResourceView{{"nvidia.com/gpu", 6, 2, new(int64(1)), new(int64(5))}}, head.Totals); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]int{"unhealthy": 2, "rejected": 1, "free": 2}, head.States); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	s.PodsUnread = "forbidden"
	if head = newHeadView(NewView(*s), 1, true, page.Colours{}); head.Totals[0].Held != nil {
		t.Error("who holds what is not known")
	}
}
