package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/test/portforward"
)

// limit is how long a test waits; the machine may be busy.
const limit = 2 * time.Minute

// api is an API server with Nodes and pods. A forwarded port leads to status.
type api struct {
	nodes []corev1.Node
	pods  []corev1.Pod
	// quotas and failures are for TestWhyNoPod.
	quotas   []corev1.ResourceQuota
	failures []corev1.Event
	// status answers for a node; nil refuses.
	status func(node string, w http.ResponseWriter, r *http.Request)
	// denied are paths answered with 403; noForward: the access review denies port-forward.
	denied    []string
	noForward bool
	// encoded are whole pages sent unchanged, by resource: for the benchmark.
	encoded map[string][]byte

	watched // For changes while it serves.

	mutex     sync.Mutex
	requests  map[string]int
	limits    []string
	url       string
	now, most int
}

func (a *api) start(t testing.TB) *Client {
	t.Helper()
	a.requests = map[string]int{}
	return a.serve(t, httptest.NewUnstartedServer(a), nil)
}

// startInMemory is start without sockets, so that a synctest bubble sees when nothing can happen any more.
func (a *api) startInMemory(t testing.TB) *Client {
	t.Helper()
	a.requests = map[string]int{}
	pipes := &pipeListener{connections: make(chan net.Conn), closed: make(chan struct{})}
	client := a.serve(t, &httptest.Server{Listener: pipes, Config: &http.Server{Handler: a}}, pipes.dial)
	client.open = func(ctx context.Context, pod Pod) (io.ReadWriteCloser, error) {
		if recorder := httptest.NewRecorder(); a.broken(recorder) {
			return nil, errors.New("away")
		}
		connection := portforward.Pipe(a.virgate(pod.Node))
		context.AfterFunc(ctx, func() { _ = connection.Close() })
		return connection, nil
	}
	return client
}

func (a *api) serve(t testing.TB, server *httptest.Server, dial func(ctx context.Context, network, address string) (net.Conn, error)) *Client {
	t.Helper()
	server.Start()
	t.Cleanup(server.Close)
	a.url, a.server = server.URL, server
	client, err := NewClient(&rest.Config{Host: a.url, Dial: dial})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// pipeListener accepts in-memory connections from dial.
type pipeListener struct {
	connections chan net.Conn
	closed      chan struct{}
	closing     sync.Once
}

func (l *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l.connections <- theirs:
		return ours, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case connection := <-l.connections:
		return connection, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.closing.Do(func() { close(l.closed) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

func (a *api) asked(kind string) int {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.requests[kind]
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	kind := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	a.mutex.Lock()
	a.requests[kind]++
	a.limits = append(a.limits, r.URL.Query().Get("limit"))
	a.mutex.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case a.broken(w):
	case slices.Contains(a.denied, kind) || r.URL.Query().Get("watch") != "" && slices.Contains(a.denied, "watch "+kind):
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: metav1.StatusReasonForbidden, Code: 403, Message: kind + " is forbidden"})
	case kind == "selfsubjectaccessreviews":
		_, _ = fmt.Fprintf(w, `{"kind":"SelfSubjectAccessReview","apiVersion":"authorization.k8s.io/v1","status":{"allowed":%t}}`, !a.noForward)
	case r.URL.Query().Get("watch") != "":
		a.watch(kind, w, r)
	case a.encoded[kind] != nil:
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		_, _ = w.Write(a.encoded[kind+r.URL.Query().Get("continue")])
	case kind == "nodes":
		list := corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}}
		a.locked(&list.ListMeta, func() { list.Items, list.Continue = pageOf(a.nodes, r) })
		_ = json.NewEncoder(w).Encode(list)
	case kind == "pods":
		list := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}}
		a.locked(&list.ListMeta, func() { list.Items, list.Continue = pageOf(podsOf(a.pods, r), r) })
		_ = json.NewEncoder(w).Encode(list)
	case kind == "resourcequotas":
		list := corev1.ResourceQuotaList{TypeMeta: metav1.TypeMeta{Kind: "ResourceQuotaList", APIVersion: "v1"}}
		for _, quota := range a.quotas {
			if r.URL.Path == "/api/v1/namespaces/"+quota.Namespace+"/resourcequotas" {
				list.Items = append(list.Items, quota)
			}
		}
		_ = json.NewEncoder(w).Encode(list)
	case kind == "events":
		list := corev1.EventList{TypeMeta: metav1.TypeMeta{Kind: "EventList", APIVersion: "v1"}, Items: a.failures}
		_ = json.NewEncoder(w).Encode(list)
	case kind == "portforward":
		_, node, _ := strings.Cut(r.URL.Path, "/pods/virgate-")
		_ = portforward.Serve(w, r, func(port string) (net.Conn, error) {
			if port != "9400" {
				return nil, fmt.Errorf("connect to port %s: connection refused", port)
			}
			return portforward.Pipe(a.virgate(node[:strings.IndexAny(node, "./")])), nil
		})
	default:
		http.NotFound(w, r)
	}
}

// virgate answers for the Virgate of a node.
func (a *api) virgate(node string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/status" || r.Host != "localhost" {
			http.NotFound(w, r)
			return
		}
		a.mutex.Lock()
		a.requests["status"]++
		a.now++
		a.most = max(a.most, a.now)
		a.mutex.Unlock()
		a.status(node, w, r)
		a.mutex.Lock()
		a.now--
		a.mutex.Unlock()
	})
}

// podsOf are the pods that the request names.
func podsOf(all []corev1.Pod, r *http.Request) []corev1.Pod {
	name, named := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	if !named {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(p corev1.Pod) bool {
		return p.Name != name || r.URL.Path != "/api/v1/namespaces/"+p.Namespace+"/pods"
	})
}

func pageOf[T any](all []T, r *http.Request) (items []T, next string) {
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	count, _ := strconv.Atoi(r.URL.Query().Get("limit"))
	if count == 0 || from+count >= len(all) {
		return slices.Clone(all[from:]), ""
	}
	return slices.Clone(all[from : from+count]), strconv.Itoa(from + count)
}

func quantities(name string, count int64) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(count, resource.DecimalSI), "cpu": resource.MustParse("8")}
}

// fill makes Nodes with 8 shares each, and on each of them Virgate and a pod with two of them.
func (a *api) fill(count int) {
	for i := range count {
		name := fmt.Sprintf("n%04d", i)
		a.nodes = append(a.nodes, corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{nodestatus.StateLabel: "applied"}},
			Status:     corev1.NodeStatus{Capacity: quantities("nvidia.com/gpu", 8), Allocatable: quantities("nvidia.com/gpu", 8)},
		})
		a.pods = append(a.pods, virgatePod(name), corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "p" + name},
			Spec:       corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: quantities("nvidia.com/gpu", 2)}}}},
		})
	}
}

func virgatePod(node string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "virgate", Name: "virgate-" + node, Labels: map[string]string{appLabel: app}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 9400}}}}},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

var options = Options{Domain: "nvidia.com", Namespace: "virgate", StatusTimeout: limit, AllTimeout: 2 * limit}

// TestSlowNodes checks fifty nodes that answer only after all others have been read: they delay none of the others,
// and the number of concurrent requests stays within its limit.
func TestSlowNodes(t *testing.T) {
	const nodes, slow = 300, 50
	var answered atomic.Int32
	others := make(chan struct{})
	a := &api{status: func(node string, w http.ResponseWriter, r *http.Request) {
		number, _ := strconv.Atoi(node[1:])
		if number < slow { // The first that are asked.
			select {
			case <-others:
				http.Error(w, "gone", http.StatusServiceUnavailable)
			case <-r.Context().Done():
				t.Errorf("node %s was given up before the others were read", node)
			}
			return
		}
		_ = json.NewEncoder(w).Encode(status.Status{Node: node, Version: "v", GPUs: []status.GPU{{UUID: "GPU-" + node}}})
		if answered.Add(1) == nodes-slow {
			close(others)
		}
	}}
	a.fill(nodes)
	s, err := a.start(t).Read(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	for i, node := range s.Nodes {
		status := s.Statuses[node.Name]
		if read := status.Page != nil; read != (i >= slow) {
			t.Errorf("%s: read %t, %q", node.Name, read, status.Unread)
		}
		if want := "its Virgate answers 503 Service Unavailable"; i < slow && status.Unread != want {
			t.Errorf("%s: %q, want %q", node.Name, status.Unread, want)
		}
	}
	if asked := a.asked("status"); asked != nodes {
		t.Errorf("%d status pages asked for, want each once: %d", asked, nodes)
	}
	if a.most > atOnce+late {
		t.Errorf("%d requests at once, want %d at most", a.most, atOnce+late)
	}
	view := NewView(s)
	if n := view.Nodes[0]; n.Unread == "" || *n.Resources[0].Free != 6 {
		t.Errorf("a node that was not read: %+v", n)
	}
	if len(view.GPUs) != nodes-slow {
		t.Errorf("%d GPUs", len(view.GPUs))
	}
}

// TestDeadNodes checks that Read gives up a node that never answers, after the node's own timeout or the timeout
// for all.
func TestDeadNodes(t *testing.T) {
	for _, test := range []struct {
		want     string
		one, all time.Duration
	}{
		{"no answer within 20ms", 20 * time.Millisecond, limit},
		{"not answered within the 20ms for all nodes", limit, 20 * time.Millisecond},
	} {
		ended := make(chan struct{})
		a := &api{status: func(string, http.ResponseWriter, *http.Request) { <-ended }}
		a.fill(atOnce + late + 1)
		client := a.start(t)
		t.Cleanup(func() { close(ended) }) // Before the server is closed.
		o := options
		o.StatusTimeout, o.AllTimeout = test.one, test.all
		s, err := client.Read(t.Context(), o)
		if err != nil || len(s.Statuses) != len(a.nodes) {
			t.Fatal(err, len(s.Statuses))
		}
		for node, status := range s.Statuses {
			if status.Unread != test.want {
				t.Errorf("%s: %q, want %q", node, status.Unread, test.want)
			}
		}
	}
}

// TestWrongAnswers checks that a node with a wrong answer, or without a pod to ask, has an error, and that the
// others are unaffected.
func TestWrongAnswers(t *testing.T) {
	a := &api{status: func(node string, w http.ResponseWriter, r *http.Request) {
		switch node {
		case "n0000":
			http.Error(w, "no", http.StatusForbidden) // The node's word, not the API server's.
		case "n0001":
			_ = json.NewEncoder(w).Encode(status.Status{Node: "n0009"})
		case "n0002":
			_, _ = w.Write([]byte("<html>"))
		case "n0003":
			_, _ = w.Write([]byte(`{"version":"` + strings.Repeat("x", 2*maxStatus) + `"}`))
		case "n0008": // What Go's server answers without TLS.
			http.Error(w, "Client sent an HTTP request to an HTTPS server.", http.StatusBadRequest)
		default:
			_ = json.NewEncoder(w).Encode(status.Status{Node: node})
		}
	}}
	a.fill(9)
	a.nodes[4].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Reason: "NodeStatusUnknown"}}
	a.pods[2*5].Status.Conditions = nil
	a.pods[2*6].Namespace = "elsewhere" // Anybody may give a pod that label there.
	s, err := a.start(t).Read(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	for node, want := range map[string]string{
		"n0000": "its Virgate answers 403 Forbidden", "n0001": `the answer is of node "n0009"`,
		"n0002": "the answer is no status", "n0003": "the answer is longer than",
		"n0004": "the node is not ready: NodeStatusUnknown", "n0008": "its Virgate requires TLS (--web-config-file)",
		"n0005": "no pod of Virgate is ready there in the namespace virgate", "n0006": "no pod of Virgate is ready there in the namespace virgate",
	} {
		if got := s.Statuses[node]; !strings.HasPrefix(got.Unread, want) || got.Page != nil {
			t.Errorf("%s: %+v, want %q", node, got, want)
		}
	}
	if s.Statuses["n0007"].Page == nil {
		t.Errorf("n0007: %+v", s.Statuses["n0007"])
	}
	if asked := a.asked("status"); asked != 6 {
		t.Errorf("%d status pages asked for, want those of 6 nodes", asked)
	}
}

// TestPages checks that lists are read in pages, without loss.
func TestPages(t *testing.T) {
	a := &api{noForward: true}
	a.fill(listLimit + 1)
	client := a.start(t)
	s, err := client.Read(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Nodes) != listLimit+1 || len(s.Pods) != 2*(listLimit+1) {
		t.Errorf("%d nodes, %d pods", len(s.Nodes), len(s.Pods))
	}
	if a.asked("nodes") != 2 || a.asked("pods") != 3 || client.Lists.Load() != 6 {
		t.Errorf("asked %v, counted %d", a.requests, client.Lists.Load())
	}
	if slices.Contains(a.limits[:5], "") {
		t.Errorf("limits %q", a.limits)
	}
	if s.StatusUnread != "you may not get and create pods/portforward in the namespace virgate" || a.asked("status") != 0 {
		t.Errorf("%q, %d status pages", s.StatusUnread, a.asked("status"))
	}
}

// TestRights checks that Nodes are shown even if pods cannot be read, and that nothing is shown if Nodes cannot be
// read.
func TestRights(t *testing.T) {
	a := &api{denied: []string{"pods"}}
	a.fill(1)
	s, err := a.start(t).Read(t.Context(), options)
	if err != nil || !strings.Contains(s.PodsUnread, "forbidden") {
		t.Fatalf("%v, %q", err, s.PodsUnread)
	}
	if r := NewView(s).Nodes[0].Resources[0]; r.Held != nil || r.Free != nil || r.Allocatable != 8 {
		t.Errorf("%+v", r)
	}
	a = &api{denied: []string{"nodes"}}
	if _, err := a.start(t).Read(t.Context(), options); err == nil || !strings.Contains(err.Error(), "list nodes: ") {
		t.Errorf("got %v", err)
	}
}

// TestNames checks that only the named nodes are read, with the pods on them or on no node, and that an unknown
// name is an error.
func TestNames(t *testing.T) {
	a := &api{noForward: true}
	a.fill(3)
	a.pods[1].Spec.NodeName = ""
	client := a.start(t)
	o := options
	o.Names = []string{"n0001"}
	s, err := client.Read(t.Context(), o)
	if err != nil || len(s.Nodes) != 1 || s.Nodes[0].Name != "n0001" || len(s.Pods) != 3 {
		t.Errorf("%v, %+v", err, s)
	}
	o.Names = []string{"n0001", "n9"}
	if _, err := client.Read(t.Context(), o); err == nil || !strings.Contains(err.Error(), "n9") {
		t.Errorf("got %v", err)
	}
}

// BenchmarkRead is the first table of 1,000 nodes with 30,000 pods and their status pages, and the most memory
// that a separate process used for it.
func BenchmarkRead(b *testing.B) {
	a := &api{}
	a.fill(1000)
	encode := func(list runtime.Object) []byte {
		var out strings.Builder
		if err := protobuf.NewSerializer(nil, nil).Encode(list, &out); err != nil {
			b.Fatal(err)
		}
		return []byte(out.String())
	}
	a.encoded = map[string][]byte{}
	for i := range a.nodes {
		for j := range 70 {
			a.nodes[i].Labels[fmt.Sprintf("feature.node.kubernetes.io/attribute-%02d", j)] = "a-value-of-usual-length"
		}
	}
	pages := func(resource string, count int, list func(from int, next string) runtime.Object) {
		for i := range count {
			from, next := "", strconv.Itoa(i+1)
			if i > 0 {
				from = strconv.Itoa(i)
			}
			if i == count-1 {
				next = ""
			}
			a.encoded[resource+from] = encode(list(i, next))
		}
	}
	pages("nodes", 2, func(i int, next string) runtime.Object {
		return &corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{Continue: next}, Items: a.nodes[i*500 : i*500+500]}
	})
	pages("pods", 60, func(i int, next string) runtime.Object {
		list := &corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{Continue: next}}
		if i < 4 {
			list.Items = slices.Clone(a.pods[i*500 : i*500+500])
		}
		for len(list.Items) < 500 {
			list.Items = append(list.Items, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: fmt.Sprint("p", i, len(list.Items))}, Spec: corev1.PodSpec{NodeName: "n0001", Containers: []corev1.Container{{Name: "c"}}}})
		}
		for j := range list.Items {
			list.Items[j].Annotations = map[string]string{"example.com/notes": strings.Repeat("x", 3000)}
		}
		return list
	})
	holder := status.Holder{Namespace: "a", Pod: "pod", Container: "c", Resource: "nvidia.com/gpu", Devices: []string{"GPU::1"}}
	var gpus []status.GPU
	for i := range 8 {
		id := fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i)
		gpus = append(gpus, status.GPU{UUID: id, Index: i, Model: "NVIDIA H100 80GB HBM3", Units: []status.Unit{{ID: id, Resource: "nvidia.com/gpu", Replicas: 4, Holders: []status.Holder{holder, holder, holder, holder}}}})
	}
	status, err := json.Marshal(status.Status{Version: "v", GPUs: gpus})
	if err != nil {
		b.Fatal(err)
	}
	a.status = func(_ string, w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(status) }
	a.nodes, a.pods = nil, nil
	client := a.start(b)
	b.ResetTimer()
	for b.Loop() {
		s, err := client.Read(b.Context(), options)
		if err != nil || len(NewView(s).GPUs) != 8000 {
			b.Fatal(err, len(NewView(s).GPUs))
		}
	}
	b.ReportMetric(float64(client.Lists.Load()+client.Pages.Load())/float64(b.N), "requests/op")
	command := exec.CommandContext(b.Context(), os.Args[0], "-test.run=^TestPeak$", "-test.v")
	command.Env = append(os.Environ(), peakVariable+"="+a.url)
	out, err := command.Output()
	_, text, found := strings.Cut(string(out), "peak ")
	peak, parseErr := strconv.ParseFloat(strings.Fields(text + " ?")[0], 64)
	if err != nil || parseErr != nil || !found {
		b.Fatalf("%v: %s", err, out)
	}
	b.ReportMetric(peak/1024, "peak-MiB")
}

// peakVariable has the server's address for TestPeak.
const peakVariable = "VIRGATE_CLUSTER_SERVER"

// TestPeak is the process whose peak memory BenchmarkRead measures.
func TestPeak(t *testing.T) {
	url := os.Getenv(peakVariable)
	if url == "" {
		t.Skip("for BenchmarkRead")
	}
	client, err := NewClient(&rest.Config{Host: url})
	if err != nil {
		t.Fatal(err)
	}
	s, err := client.Read(t.Context(), options)
	if err != nil || len(NewView(s).GPUs) != 8000 {
		t.Fatal(err)
	}
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); fields[0] == "VmHWM:" {
			t.Logf("peak %s", fields[1])
		}
	}
}
