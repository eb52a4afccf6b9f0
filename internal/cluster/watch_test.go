package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/test/await"
)

// watched is an api's state for watches. It shares the api's mutex.
type watched struct {
	server *httptest.Server
	// version is the version of the last change; versions before oldest are forgotten.
	version, oldest int
	events          []event
	// moved is closed at the next change; down refuses each request.
	moved chan struct{}
	down  bool
}

type event struct {
	kind    string
	version int
	line    []byte
}

func (a *api) locked(of *metav1.ListMeta, read func()) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	read()
	of.ResourceVersion = strconv.Itoa(a.version + 1)
}

// change makes a change and sends it to the watches.
func (a *api) change(kind, what string, object metav1.Object, change func()) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	change()
	a.version++
	object.SetResourceVersion(strconv.Itoa(a.version + 1))
	line, err := json.Marshal(map[string]any{"type": what, "object": object})
	if err != nil {
		panic(err)
	}
	a.events = append(a.events, event{kind, a.version + 1, line})
	a.wake()
}

func (a *api) wake() {
	if a.moved != nil {
		close(a.moved)
		a.moved = nil
	}
}

// cut breaks all connections; with down, new ones are refused.
func (a *api) cut(down bool) {
	a.mutex.Lock()
	a.down = down
	a.wake()
	a.mutex.Unlock()
	a.server.CloseClientConnections()
}

func (a *api) broken(w http.ResponseWriter) bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.down {
		http.Error(w, "away", http.StatusServiceUnavailable)
	}
	return a.down
}

func (a *api) watch(kind string, w http.ResponseWriter, r *http.Request) {
	from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil || r.URL.Query().Get("allowWatchBookmarks") != "true" || r.URL.Query().Get("timeoutSeconds") == "" {
		http.Error(w, "not what a watch should ask for", http.StatusBadRequest)
		return
	}
	for {
		a.mutex.Lock()
		expired := from < a.oldest
		var lines [][]byte
		for _, e := range a.events {
			if e.kind == kind && e.version > from {
				lines, from = append(lines, e.line), e.version
			}
		}
		if a.moved == nil {
			a.moved = make(chan struct{})
		}
		moved := a.moved
		a.mutex.Unlock()
		if expired {
			lines = [][]byte{[]byte(`{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410,"message":"too old resource version"}}`)}
		}
		for _, line := range lines {
			_, _ = w.Write(append(line, '\n'))
		}
		w.(http.Flusher).Flush()
		if expired {
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-moved:
		}
	}
}

func (a *api) setNode(i int, change func(*corev1.Node)) {
	node := a.nodes[i].DeepCopy()
	node.TypeMeta = metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}
	change(node)
	a.change("nodes", "MODIFIED", node, func() { a.nodes[i] = *node })
}

func (a *api) addPod(pod corev1.Pod) {
	pod.TypeMeta = metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}
	a.change("pods", "ADDED", &pod, func() { a.pods = append(a.pods, pod) })
}

func (a *api) deletePod(name string) {
	i := slices.IndexFunc(a.pods, func(p corev1.Pod) bool { return p.Name == name })
	pod := a.pods[i]
	pod.TypeMeta = metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}
	a.change("pods", "DELETED", &pod, func() { a.pods = slices.Delete(a.pods, i, i+1) })
}

// says answers for each node, and counts.
func says(asked *atomic.Int32) func(string, http.ResponseWriter, *http.Request) {
	return func(node string, w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_ = json.NewEncoder(w).Encode(status.Status{Node: node, GPUs: []status.GPU{{UUID: "GPU-" + node}}})
	}
}

// started is a running Watcher with short pauses; it ends with the test or with stop.
func started(t testing.TB, client *Client, o Options, change func(*watchPace)) (w *Watcher, stop func()) {
	t.Helper()
	w = client.NewWatcher(o)
	w.pace.tick, w.pace.least, w.pace.first, w.pace.later = time.Millisecond, time.Millisecond, limit, time.Hour
	if change != nil {
		change(&w.pace)
	}
	ended, stopped := make(chan error, 1), false
	parent, cancel := context.WithCancel(t.Context())
	go func() { ended <- w.Run(parent) }()
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(stop)
	return w, stop
}

// until waits for a snapshot that satisfies is.
func until(t testing.TB, w *Watcher, what string, is func(Snapshot) bool) Snapshot {
	t.Helper()
	late, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for {
		s, newer := w.Latest()
		if s != nil && is(*s) {
			return *s
		}
		select {
		case <-newer:
		case <-late.Done():
			t.Fatalf("%s: not in %s; last: %+v", what, limit, s)
		}
	}
}

func holds(name string) func(Snapshot) bool {
	return func(s Snapshot) bool {
		return slices.ContainsFunc(s.Pods, func(p Pod) bool { return p.Name == name })
	}
}

func gpuPod(name, node string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: quantities("nvidia.com/gpu", 1)}}}},
	}
}

// settled waits until both watches have had an event. Otherwise, the Reflector takes a watch that is cut within a
// second for one that never worked, and lists.
func (a *api) settled(t testing.TB, w *Watcher) {
	t.Helper()
	until(t, w, "the lists", func(Snapshot) bool { return true })
	a.addPod(gpuPod("settled", "n0001"))
	a.setNode(1, func(n *corev1.Node) { n.Spec.Unschedulable = true })
	until(t, w, "settled", func(s Snapshot) bool {
		return holds("settled")(s) && slices.ContainsFunc(s.Nodes, func(n Node) bool { return n.Cordoned })
	})
}

// TestWatch checks that a change is in the next snapshot and that earlier snapshots do not change. There is no
// second list, and pods without GPUs are not kept.
func TestWatch(t *testing.T) {
	var asked atomic.Int32
	a := &api{status: says(&asked)}
	a.fill(3)
	client := a.start(t)
	w, _ := started(t, client, options, nil)
	if s, newer := w.Latest(); s != nil || newer == nil {
		t.Errorf("before the first: %v", s)
	}
	first := until(t, w, "the first", func(Snapshot) bool { return true })
	if len(first.Nodes) != 3 || len(first.Pods) != 6 || first.Nodes[2].Name != "n0002" || first.Pods[0].Name != "pn0000" {
		t.Errorf("the first: %+v", first)
	}
	for name, status := range first.Statuses { // It has waited for them.
		if status.Page == nil || status.Page.Node != name || status.Unread != "" {
			t.Errorf("%s: %+v", name, status)
		}
	}
	a.addPod(gpuPod("new", "n0001"))
	until(t, w, "a new pod", holds("new"))
	a.addPod(corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "nothing"}, Spec: corev1.PodSpec{NodeName: "n0001"}})
	a.setNode(1, func(n *corev1.Node) { n.Status.Allocatable = quantities("nvidia.com/gpu", 5) })
	s := until(t, w, "a changed Node", func(s Snapshot) bool { return s.Nodes[1].Allocatable["nvidia.com/gpu"] == 5 })
	if held := NewView(s).Nodes[1].Resources[0]; *held.Held != 3 || *held.Free != 2 || held.Unhealthy != 3 {
		t.Errorf("%+v", held)
	}
	a.deletePod("new")
	s = until(t, w, "a deleted pod", func(s Snapshot) bool { return !holds("new")(s) })
	if s.Lost != "" || holds("nothing")(s) {
		t.Errorf("%+v", s)
	}
	a.setNode(2, func(n *corev1.Node) { n.Labels, n.Status = nil, corev1.NodeStatus{} })
	until(t, w, "a Node without GPUs", func(s Snapshot) bool { return len(s.Nodes) == 2 })
	if first.Nodes[1].Allocatable["nvidia.com/gpu"] != 8 || len(first.Pods) != 6 {
		t.Errorf("an earlier snapshot has changed: %+v", first)
	}
	if got := client.Lists.Load(); got != 5 { // Two lists, two watches, one review.
		t.Errorf("%d requests", got)
	}
}

// TestWatchSame checks that an update without a difference is no change.
func TestWatchSame(t *testing.T) {
	a := &api{}
	a.fill(1)
	w := (&Client{}).NewWatcher(options)
	w.nodes.listed = map[string]Node{}
	w.nodes.Replace(nil, "")
	for _, want := range []bool{true, false} {
		w.changed = false
		if w.nodes.Update(a.nodes[0].DeepCopy()); w.changed != want {
			t.Errorf("changed %t, want %t", w.changed, want)
		}
	}
}

// TestWatchAsksAtOnce checks that a node's status page is read again when its profile or Virgate's pod has changed,
// and no other node's page is.
func TestWatchAsksAtOnce(t *testing.T) {
	var asked atomic.Int32
	a := &api{status: says(&asked)}
	a.fill(3)
	w, _ := started(t, a.start(t), options, nil)
	until(t, w, "the first", func(Snapshot) bool { return true })
	if asked.Load() != 3 {
		t.Errorf("%d status pages", asked.Load())
	}
	for i, change := range []func(){
		func() {
			a.setNode(1, func(n *corev1.Node) { n.Labels = map[string]string{nodestatus.StateLabel: "pending"} })
		},
		func() {
			a.setNode(1, func(n *corev1.Node) { n.Annotations = map[string]string{nodestatus.GenerationAnnotation: "2"} })
		},
		func() { // Of two pods, the name decides which is asked.
			pod := virgatePod("n0001")
			pod.Name += ".z"
			a.addPod(pod)
		},
	} {
		s, _ := w.Latest()
		before := s.Statuses["n0001"].Page
		change()
		until(t, w, "another page", func(s Snapshot) bool { page := s.Statuses["n0001"].Page; return page != nil && page != before })
		if got := asked.Load(); got != int32(4+i) {
			t.Errorf("after change %d: %d status pages", i, got)
		}
	}
	// A heartbeat is no reason.
	a.setNode(1, func(n *corev1.Node) {
		n.Status.Conditions = []corev1.NodeCondition{{Type: nodestatus.ConditionType, Status: corev1.ConditionTrue}}
	})
	until(t, w, "the heartbeat", func(s Snapshot) bool { return s.Nodes[1].Condition.Type != "" })
	// A removed node takes its page with it.
	a.setNode(1, func(n *corev1.Node) {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: "Gone"}}
	})
	s := until(t, w, "not ready", func(s Snapshot) bool { return s.Nodes[1].NotReady != "" })
	if status := s.Statuses["n0001"]; status.Page != nil || status.Unread != "the node is not ready: Gone" {
		t.Errorf("%+v", status)
	}
	if got := asked.Load(); got != 6 {
		t.Errorf("%d status pages", got)
	}
	a.setNode(1, func(n *corev1.Node) { n.Status.Conditions = nil })
	until(t, w, "ready again", func(s Snapshot) bool { return s.Statuses["n0001"].Page != nil })
	if got := asked.Load(); got != 7 {
		t.Errorf("%d status pages once it is ready again", got)
	}
}

// TestWatchAsksAgain checks that each page is read again after a time, and that snapshots come without changes.
func TestWatchAsksAgain(t *testing.T) {
	var asked atomic.Int32
	a := &api{status: says(&asked)}
	a.fill(3)
	w, _ := started(t, a.start(t), options, func(p *watchPace) { p.later = 10 * time.Millisecond })
	pages := map[string]map[*status.Status]bool{}
	until(t, w, "three pages of each", func(s Snapshot) bool {
		all := len(s.Nodes) == 3
		for name, answer := range s.Statuses {
			if pages[name] == nil {
				pages[name] = map[*status.Status]bool{}
			}
			pages[name][answer.Page] = true
			all = all && len(pages[name]) >= 3
		}
		return all
	})
	o := options
	o.StatusTimeout = 0
	w, _ = started(t, (&api{}).start(t), o, func(p *watchPace) { p.later = 10 * time.Millisecond })
	one := until(t, w, "the first", func(Snapshot) bool { return true })
	until(t, w, "a second", func(s Snapshot) bool { return s.At.After(one.At) })
}

// TestWatchPace checks that snapshots keep their interval, and that there are at most as many concurrent requests
// as in Read.
func TestWatchPace(t *testing.T) {
	const least = 20 * time.Millisecond
	var asked atomic.Int32
	a := &api{status: says(&asked)}
	a.fill(300)
	w, _ := started(t, a.start(t), options, func(p *watchPace) { p.first, p.least, p.later = 0, least, 20*time.Millisecond })
	var last time.Time
	for range 20 {
		s := until(t, w, "another", func(s Snapshot) bool { return s.At.After(last) })
		if pause := s.At.Sub(last); pause < least {
			t.Errorf("two snapshots within %s", pause)
		}
		last = s.At
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.most > atOnce+late {
		t.Errorf("%d requests at once, want %d at most", a.most, atOnce+late)
	}
}

// TestWatchExpired checks that after an expired version the watcher lists again and misses nothing.
func TestWatchExpired(t *testing.T) {
	a := &api{noForward: true}
	a.fill(2)
	w, _ := started(t, a.start(t), options, nil)
	a.settled(t, w)
	before := a.asked("pods")
	a.mutex.Lock() // No watch gets these changes.
	a.pods = append(slices.DeleteFunc(a.pods, func(p corev1.Pod) bool { return p.Name == "pn0000" }), gpuPod("new", "n0001"))
	a.version++
	a.oldest = a.version + 1
	a.wake()
	a.mutex.Unlock()
	s := until(t, w, "what is new", holds("new"))
	if holds("pn0000")(s) || s.Lost != "" {
		t.Errorf("%+v", s)
	}
	a.addPod(gpuPod("newer", "n0001"))
	until(t, w, "what is newer", holds("newer"))
	if got := a.asked("pods") - before; got != 2 { // A list and a watch.
		t.Errorf("%d requests", got)
	}
}

// TestWatchBroken checks that while the server is away the last data and status pages stay, with the time since
// when, and that the watch goes on afterwards.
func TestWatchBroken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		a := &api{status: says(&asked)}
		a.fill(2)
		client := a.startInMemory(t)
		w, _ := started(t, client, options, func(p *watchPace) { p.later = 20 * time.Millisecond })
		a.settled(t, w)
		a.cut(true)
		s := until(t, w, "lost", func(s Snapshot) bool {
			w.mutex.Lock()
			defer w.mutex.Unlock()
			return s.Lost != "" && w.nodes.failure != nil
		})
		since, _, _ := strings.Cut(s.Lost, ", ")
		pages, tries := a.asked("status"), client.Lists.Load()
		s = until(t, w, "some tries later", func(next Snapshot) bool {
			return next.At.Sub(s.At) > 1100*time.Millisecond && client.Lists.Load() >= tries+4
		})
		if more := a.asked("status") - pages; more > 2 { // Two may have been under way.
			t.Errorf("%d status pages asked for without an API server", more)
		}
		if !strings.HasPrefix(s.Lost, since+", ") || !strings.HasPrefix(s.Lost, "not connected since 2") || !strings.Contains(s.Lost, "may be old: ") {
			t.Errorf("first %q, then %q", since, s.Lost)
		}
		if notes := NewView(s).Notes; len(notes) != 1 || notes[0] != s.Lost {
			t.Errorf("%q", notes)
		}
		if len(s.Nodes) != 2 || len(s.Pods) != 5 || s.Statuses["n0000"].Page == nil || s.Statuses["n0001"].Page == nil {
			t.Errorf("%+v", s)
		}
		a.addPod(gpuPod("new", "n0001"))
		a.cut(false)
		until(t, w, "what is new", holds("new"))
		until(t, w, "connected, and each page well", func(s Snapshot) bool {
			return s.Lost == "" && s.Statuses["n0000"].Unread == "" && s.Statuses["n0001"].Unread == ""
		})
	})
}

// TestWatchSlowPages checks that a page that does not come delays nothing else, and that a node's last page stays
// for a while.
func TestWatchSlowPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hang atomic.Bool
		hang.Store(true)
		ended := make(chan struct{})
		a := &api{status: func(node string, w http.ResponseWriter, r *http.Request) {
			if hang.Load() && node == "n0000" {
				select {
				case <-ended:
				case <-r.Context().Done():
				}
				return
			}
			_ = json.NewEncoder(w).Encode(status.Status{Node: node})
		}}
		a.fill(2)
		client := a.startInMemory(t)
		t.Cleanup(func() { close(ended) })
		o := options
		w, stop := started(t, client, o, func(p *watchPace) { p.first = time.Millisecond })
		s := until(t, w, "the other node", func(s Snapshot) bool { return s.Statuses["n0001"].Page != nil })
		if got := s.Statuses["n0000"]; got.Page != nil || got.Unread != "not read yet" {
			t.Errorf("%+v", got)
		}
		a.addPod(gpuPod("new", "n0000"))
		until(t, w, "a new pod", holds("new"))
		stop() // It does not wait for the page.

		hang.Store(false)
		o.StatusTimeout = 50 * time.Millisecond
		w, _ = started(t, client, o, func(p *watchPace) { p.later, p.kept = time.Millisecond, 500*time.Millisecond })
		until(t, w, "a page", func(s Snapshot) bool { return s.Statuses["n0000"].Page != nil })
		hang.Store(true)
		s = until(t, w, "no page", func(s Snapshot) bool { return s.Statuses["n0000"].Unread != "" })
		if got := s.Statuses["n0000"]; got.Page != nil && !strings.Contains(got.Unread, "no answer within 50ms; what is shown was said at 2") {
			t.Errorf("%q", got.Unread)
		}
		until(t, w, "given up", func(s Snapshot) bool {
			return s.Statuses["n0000"].Page == nil && s.Statuses["n0000"].Unread == "no answer within 50ms"
		})
	})
}

// TestWatchRights checks the rights that a user may lack: without those to watch Nodes there is an error at once;
// without those for pods there are still Nodes; pods that may be listed but not watched are shown with a note.
func TestWatchRights(t *testing.T) {
	for denied, want := range map[string]string{"nodes": "list nodes: nodes is forbidden", "watch nodes": "watch nodes: nodes is forbidden"} {
		a := &api{denied: []string{denied}}
		a.fill(1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if err := a.start(t).NewWatcher(options).Run(ctx); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %q", denied, err, want)
		}
	}
	a := &api{denied: []string{"pods"}}
	a.fill(1)
	w, _ := started(t, a.start(t), options, nil)
	s := until(t, w, "the first", func(Snapshot) bool { return true })
	if !strings.HasPrefix(s.PodsUnread, "list pods: pods is forbidden") || s.Lost != "" || len(s.Statuses) != 0 || len(s.Nodes) != 1 {
		t.Errorf("%+v", s)
	}
	a = &api{denied: []string{"watch pods"}, noForward: true}
	a.fill(1)
	w, _ = started(t, a.start(t), options, nil)
	s = until(t, w, "the note", func(s Snapshot) bool { return s.Lost != "" })
	if !strings.Contains(s.Lost, "watch pods: pods is forbidden") || len(s.Pods) != 2 || s.StatusUnread != "you may not get and create pods/portforward in the namespace virgate" {
		t.Errorf("%+v", s)
	}
}

// TestWatchNames checks that only the named nodes and their pods are watched. An unknown name is an error at first,
// but not once the node was there.
func TestWatchNames(t *testing.T) {
	a := &api{noForward: true}
	a.fill(3)
	client := a.start(t)
	o := options
	o.Names = []string{"n0001", "n9"}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := client.NewWatcher(o).Run(ctx); !errors.Is(err, errNoNode) || !strings.HasSuffix(err.Error(), ": n9") {
		t.Errorf("got %v", err)
	}
	o.Names = []string{"n0001", "n0002"}
	w, _ := started(t, client, o, nil)
	s := until(t, w, "the first", func(Snapshot) bool { return true })
	if len(s.Nodes) != 2 || len(s.Pods) != 4 {
		t.Errorf("%+v", s)
	}
	a.settled(t, w)
	a.cut(true)
	until(t, w, "lost", func(s Snapshot) bool { return s.Lost != "" })
	a.mutex.Lock()
	a.nodes = slices.Delete(a.nodes, 2, 3)
	a.version++
	a.oldest = a.version + 1
	a.mutex.Unlock()
	a.cut(false)
	until(t, w, "without it", func(s Snapshot) bool { return len(s.Nodes) == 1 && len(s.Pods) == 3 && s.Lost == "" })
}

// TestWatchEnds checks that a Watcher leaves no goroutine, at whatever point it ends.
func TestWatchEnds(t *testing.T) {
	var asked atomic.Int32
	a := &api{status: says(&asked)}
	a.fill(50)
	client := a.start(t)
	for _, what := range []string{"at the start", "with a snapshot", "without a server"} {
		w, stop := started(t, client, options, nil)
		switch what {
		case "with a snapshot":
			until(t, w, what, func(Snapshot) bool { return true })
		case "without a server":
			a.settled(t, w)
			a.cut(true)
			until(t, w, what, func(s Snapshot) bool { return s.Lost != "" })
		}
		stop()
		await.Until(t, "the end of all goroutines", func() error {
			if left := ours(); left != "" {
				return fmt.Errorf("%s: still running:\n%s", what, left)
			}
			return nil
		})
	}
}

// ours are the stacks of goroutines of a Watcher: of this package's code, or of client-go's watches.
func ours() string {
	buffer := make([]byte, 8<<20)
	var left []string
	for stack := range strings.SplitSeq(string(buffer[:runtime.Stack(buffer, true)]), "\n\n") {
		for _, part := range []string{"cluster.(*Watcher)", "cluster.(*followed", "configsource.", "client-go/tools/cache.", "apimachinery/pkg/watch.", "cluster.(*Client)"} {
			if strings.Contains(stack, part) {
				left = append(left, stack)
				break
			}
		}
	}
	return strings.Join(left, "\n\n")
}

// BenchmarkWatch measures a Watcher's memory for 1,000 nodes with 30,000 pods that hold shares, without status
// pages, and the time to make a snapshot.
func BenchmarkWatch(b *testing.B) {
	const nodes, pods = 1000, 30000
	w := (&Client{}).NewWatcher(Options{Domain: "nvidia.com", Namespace: "virgate"})
	labels := map[string]string{}
	for i := range 70 {
		labels[fmt.Sprintf("feature.node.kubernetes.io/attribute-%02d", i)] = "a-value-of-usual-length"
	}
	memory := func() float64 {
		runtime.GC()
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		return float64(now.HeapAlloc)
	}
	before := memory()
	w.nodes.listed, w.pods.listed = map[string]Node{}, map[string]Pod{}
	w.nodes.Replace(nil, "")
	w.pods.Replace(nil, "")
	for i := range nodes {
		node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%04d", i), Labels: labels}}
		node.Status.Capacity, node.Status.Allocatable = quantities("nvidia.com/gpu", 32), quantities("nvidia.com/gpu", 32)
		w.nodes.Update(&node)
	}
	for i := range pods {
		pod := gpuPod(fmt.Sprintf("p%05d", i), fmt.Sprintf("n%04d", i%nodes))
		pod.Annotations = map[string]string{"example.com/notes": strings.Repeat("x", 3000)}
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", AllocatedResourcesStatus: []corev1.ResourceStatus{{
			Name: "nvidia.com/gpu", Resources: []corev1.ResourceHealth{{ResourceID: corev1.ResourceID(fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d::%d", i%8, i%4)), Health: "Healthy"}},
		}}}}
		w.pods.Update(&pod)
	}
	kept := memory() - before
	now := time.Now()
	for b.Loop() {
		w.changed, now = true, now.Add(w.pace.least)
		w.step(now)
	}
	if s, _ := w.Latest(); len(s.Pods) != pods || len(s.Nodes) != nodes {
		b.Fatal(len(s.Pods), len(s.Nodes))
	}
	b.ReportMetric(kept/(1<<20), "kept-MiB")
	b.ReportMetric((memory()-before)/(1<<20), "kept-with-snapshot-MiB")
	runtime.KeepAlive(w)
}
