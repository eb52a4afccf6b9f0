package nodestatus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/test/bufconn"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/test/await"
)

const nodeName = "n1"

// fakeAPI is an API server with one Node and Events. It merges like a real one, and can refuse, be slow or be
// away.
type fakeAPI struct {
	t *testing.T
	// listener is in memory, so that a test can run in a synctest bubble.
	listener *bufconn.Listener

	mutex sync.Mutex
	// node may be nil.
	node   *corev1.Node
	events map[string]corev1.Event
	// features is the NodeFeature virgate/features, or nil; pod is the answer for the program's pod, empty for 403.
	features map[string]any
	pod      string
	// allFeatures are NodeFeatures of all namespaces, nil where NFD is not installed.
	allFeatures []metav1.ObjectMeta
	// requests are "METHOD PATH CONTENT-TYPE", in their order.
	requests []string
	// refuse has the status for requests whose path ends like this, 0 to serve them.
	refuse map[string]int
	// refuseWrites refuses all writes as an admission policy does.
	refuseWrites bool
	// hang lets requests wait until they are given up.
	hang bool
	// changed is closed and made anew with each request.
	changed chan struct{}
}

func newFakeAPI(t *testing.T) *fakeAPI {
	t.Helper()
	f := &fakeAPI{t: t, node: newNode(), events: map[string]corev1.Event{}, refuse: map[string]int{}, changed: make(chan struct{})}
	f.listener = bufconn.Listen(64 << 10)
	server := &http.Server{Handler: f, ReadHeaderTimeout: time.Hour}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = server.Serve(f.listener) }()
	t.Cleanup(func() { _ = server.Close(); <-ended })
	return f
}

func newNode() *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: nodeName, Labels: map[string]string{"theirs": "label"}, Annotations: map[string]string{"theirs": "annotation"},
	}}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}}
	return node
}

func (f *fakeAPI) config() *rest.Config {
	return &rest.Config{Host: "http://in-memory", Dial: func(ctx context.Context, _, _ string) (net.Conn, error) { return f.listener.DialContext(ctx) }}
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	f.mutex.Lock()
	hang := f.hang
	f.mutex.Unlock()
	if hang {
		<-r.Context().Done()
		return
	}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.requests = append(f.requests, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+r.Header.Get("Content-Type")))
	defer func() { close(f.changed); f.changed = make(chan struct{}) }()
	w.Header().Set("Content-Type", "application/json")
	if r.Method != http.MethodGet && r.Method != http.MethodDelete && r.URL.Query().Get("fieldManager") != "virgate" {
		f.t.Errorf("%s %s by field manager %q", r.Method, r.URL, r.URL.Query().Get("fieldManager"))
	}
	if f.refuseWrites && r.Method != http.MethodGet {
		answer(w, http.StatusUnprocessableEntity, "ValidatingAdmissionPolicy denied request")
		return
	}
	for path, status := range f.refuse {
		if strings.HasSuffix(r.URL.Path, path) && status != 0 {
			answer(w, status, "refused by the test")
			return
		}
	}
	switch path := r.URL.Path; {
	case path == "/api/v1/nodes/"+nodeName || path == "/api/v1/nodes/"+nodeName+"/status":
		f.serveNode(w, r, body)
	case path == "/api/v1/nodes":
		f.serveNames(w, r)
	case strings.HasPrefix(path, "/api/v1/namespaces/default/events"):
		f.serveEvent(w, r, body)
	case strings.HasSuffix(path, "/nodefeatures") && r.Method == http.MethodGet || r.Method == http.MethodDelete:
		f.serveAllFeatures(w, r, body)
	case strings.HasPrefix(path, "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/virgate/nodefeatures"):
		f.serveFeatures(w, r, body)
	case path == "/api/v1/namespaces/virgate/pods/virgate-1":
		if f.pod == "" {
			answer(w, http.StatusForbidden, "no right")
			return
		}
		_, _ = io.WriteString(w, f.pod)
	default:
		f.t.Errorf("%s %s: nothing of Virgate's", r.Method, path)
		answer(w, http.StatusNotFound, "no such thing")
	}
}

// alreadyExists is the message of the one conflict that is not about versions.
const alreadyExists = "already exists"

func answer(w http.ResponseWriter, status int, message string) {
	reason := map[int]metav1.StatusReason{
		403: metav1.StatusReasonForbidden, 404: metav1.StatusReasonNotFound, 409: metav1.StatusReasonConflict, 422: metav1.StatusReasonInvalid,
	}[status]
	if message == alreadyExists {
		reason = metav1.StatusReasonAlreadyExists
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Message: message, Reason: reason, Code: int32(status),
	})
}

func (f *fakeAPI) serveNode(w http.ResponseWriter, r *http.Request, body []byte) {
	if f.node == nil {
		answer(w, http.StatusNotFound, `nodes "n1" not found`)
		return
	}
	if r.Method == http.MethodPatch {
		next := f.node.DeepCopy()
		var err error
		switch r.Header.Get("Content-Type") {
		case "application/strategic-merge-patch+json":
			err = merge(next, body)
		case "application/json-patch+json":
			if err = relabel(next, body); err != nil {
				err = removeCapacity(next, body)
			}
		default:
			err = fmt.Errorf("a patch of type %s", r.Header.Get("Content-Type"))
		}
		if err != nil {
			answer(w, http.StatusUnprocessableEntity, err.Error())
			return
		}
		// Each kind of request changes only its part, as with the real API.
		if strings.HasSuffix(r.URL.Path, "/status") {
			f.node.Status = next.Status
		} else {
			f.node.ObjectMeta = next.ObjectMeta
		}
	} else if r.Method != http.MethodGet {
		f.t.Errorf("%s of a node", r.Method)
	}
	_ = json.NewEncoder(w).Encode(f.node)
}

// serveNames lists the Node, and two others on two pages more.
func (f *fakeAPI) serveNames(w http.ResponseWriter, r *http.Request) {
	page := metav1.PartialObjectMetadataList{ListMeta: metav1.ListMeta{Continue: "n0"}, Items: []metav1.PartialObjectMetadata{{ObjectMeta: f.node.ObjectMeta}}}
	switch name := r.URL.Query().Get("continue"); name {
	case "n0":
		page.Continue, page.Items[0].Name = "n2", name
	case "n2":
		page.Continue, page.Items[0].Name = "", name
	}
	_ = json.NewEncoder(w).Encode(page)
}

// merge patches an object in place.
func merge[T any](object *T, patch []byte) error {
	data, err := json.Marshal(object)
	if err != nil {
		return err
	}
	var before, change map[string]any
	if err := errors.Join(json.Unmarshal(data, &before), json.Unmarshal(patch, &change)); err != nil {
		return err
	}
	if data, err = json.Marshal(strategicMerge(before, change)); err != nil {
		return err
	}
	*object = *new(T)
	return json.Unmarshal(data, object)
}

// strategicMerge is a strategic merge for the types used here: null deletes a key, maps are merged, and lists of
// conditions by type.
func strategicMerge(object, patch map[string]any) map[string]any {
	if object == nil {
		object = map[string]any{}
	}
	for key, value := range patch {
		switch value := value.(type) {
		case nil:
			delete(object, key)
		case map[string]any:
			inner, _ := object[key].(map[string]any)
			object[key] = strategicMerge(inner, value)
		case []any:
			list, _ := object[key].([]any)
			for _, item := range value {
				item := item.(map[string]any)
				if item["$patch"] == "delete" {
					list = slices.DeleteFunc(list, func(other any) bool { return other.(map[string]any)["type"] == item["type"] })
					continue
				}
				i := slices.IndexFunc(list, func(other any) bool { return other.(map[string]any)["type"] == item["type"] })
				if i < 0 {
					list = append(list, item)
				} else {
					list[i] = strategicMerge(list[i].(map[string]any), item)
				}
			}
			object[key] = list
		default:
			object[key] = value
		}
	}
	return object
}

// relabel is a JSON patch that gives a label with one value another one.
func relabel(node *corev1.Node, patch []byte) error {
	var operations []struct{ Op, Path, Value string }
	if err := json.Unmarshal(patch, &operations); err != nil {
		return err
	}
	if len(operations) != 2 || operations[0].Op != "test" || operations[1].Op != "replace" || operations[0].Path != operations[1].Path {
		return fmt.Errorf("the patch %s", patch)
	}
	escaped, ok := strings.CutPrefix(operations[0].Path, "/metadata/labels/")
	label := strings.NewReplacer("~1", "/", "~0", "~").Replace(escaped)
	value, exists := node.Labels[label]
	if !ok || !exists || value != operations[0].Value {
		return fmt.Errorf("test of %s is not true", operations[0].Path)
	}
	node.Labels[label] = operations[1].Value
	return nil
}

// removeCapacity is the other JSON patch that there is.
func removeCapacity(node *corev1.Node, patch []byte) error {
	var operations []struct{ Op, Path, Value string }
	if err := json.Unmarshal(patch, &operations); err != nil {
		return err
	}
	if len(operations) != 2 || operations[0].Op != "test" || operations[1].Op != "remove" || operations[0].Path != operations[1].Path {
		return fmt.Errorf("the patch %s", patch)
	}
	escaped, ok := strings.CutPrefix(operations[0].Path, "/status/capacity/")
	name := corev1.ResourceName(strings.NewReplacer("~1", "/", "~0", "~").Replace(escaped))
	quantity, exists := node.Status.Capacity[name]
	if !ok || !exists || quantity.String() != operations[0].Value {
		return fmt.Errorf("test of %s is not true", operations[0].Path)
	}
	delete(node.Status.Capacity, name)
	return nil
}

func (f *fakeAPI) serveEvent(w http.ResponseWriter, r *http.Request, body []byte) {
	switch r.Method {
	case http.MethodPost:
		var event corev1.Event
		if err := json.Unmarshal(body, &event); err != nil {
			answer(w, http.StatusBadRequest, err.Error())
			return
		}
		if _, ok := f.events[event.Name]; ok {
			answer(w, http.StatusConflict, alreadyExists)
			return
		}
		f.events[event.Name] = event
	case http.MethodPatch:
		name := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
		event, ok := f.events[name]
		if !ok {
			answer(w, http.StatusNotFound, "no such event")
			return
		}
		if err := merge(&event, body); err != nil {
			answer(w, http.StatusUnprocessableEntity, err.Error())
			return
		}
		f.events[name] = event
	default:
		f.t.Errorf("%s of an event", r.Method)
	}
	_, _ = w.Write([]byte("{}"))
}

// change changes the server's state.
func (f *fakeAPI) change(do func()) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	do()
}

// await waits until holds is true of the server's state.
func (f *fakeAPI) await(what string, holds func() bool) {
	f.t.Helper()
	late := time.NewTimer(await.Patience)
	defer late.Stop()
	for {
		f.mutex.Lock()
		changed, ok := f.changed, holds()
		state := f.describe()
		f.mutex.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-late.C:
			f.t.Fatalf("not %s:\n%s", what, state)
		}
	}
}

func (f *fakeAPI) describe() string {
	text := strings.Join(f.requests[max(0, len(f.requests)-40):], "\n")
	if f.node != nil {
		text += fmt.Sprintf("\n%v %v\n%+v", f.node.Annotations, f.node.Labels, f.node.Status.Conditions)
	}
	return text + "\n" + strings.Join(f.told(), "\n")
}

// told are the events as "REASON MESSAGE xCOUNT", in order of their start.
func (f *fakeAPI) told() []string {
	events := slices.SortedFunc(maps.Values(f.events), func(a, b corev1.Event) int { return strings.Compare(a.Name, b.Name) })
	lines := make([]string, len(events))
	for i, e := range events {
		lines[i] = fmt.Sprintf("%s %s x%d", e.Reason, e.Message, e.Count)
	}
	return lines
}

// condition is the Node's GPUSharingReady; ok is false without one.
func (f *fakeAPI) condition() (condition corev1.NodeCondition, ok bool) {
	if f.node == nil {
		return corev1.NodeCondition{}, false
	}
	i := slices.IndexFunc(f.node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == ConditionType })
	if i < 0 {
		return corev1.NodeCondition{}, false
	}
	return f.node.Status.Conditions[i], true
}

// count counts requests that begin so.
func (f *fakeAPI) count(prefix string) int {
	count := 0
	for _, request := range f.requests {
		if strings.HasPrefix(request, prefix) {
			count++
		}
	}
	return count
}

// serveFeatures keeps one NodeFeature, as a real server with NFD's CustomResourceDefinition does.
func (f *fakeAPI) serveFeatures(w http.ResponseWriter, r *http.Request, body []byte) {
	one := strings.HasSuffix(r.URL.Path, "/nodefeatures/features")
	switch {
	case r.Method == http.MethodPost && !one && f.features == nil:
	case r.Method == http.MethodPut && one && f.features != nil:
	case r.Method == http.MethodGet && one && f.features != nil:
		_ = json.NewEncoder(w).Encode(f.features)
		return
	case r.Method == http.MethodGet && one:
		answer(w, http.StatusNotFound, "no such object")
		return
	default:
		f.t.Errorf("%s %s", r.Method, r.URL.Path)
	}
	var next map[string]any
	if err := json.Unmarshal(body, &next); err != nil {
		answer(w, http.StatusBadRequest, err.Error())
		return
	}
	metadata := next["metadata"].(map[string]any)
	if f.features != nil && metadata["resourceVersion"] != f.features["metadata"].(map[string]any)["resourceVersion"] {
		answer(w, http.StatusConflict, "another version")
		return
	}
	metadata["resourceVersion"] = fmt.Sprint(len(f.requests))
	f.features = next
	_, _ = w.Write([]byte("{}"))
}

// serveAllFeatures lists the NodeFeatures of all namespaces, one a page, and deletes the one that is
// asked for by its path and UID.
func (f *fakeAPI) serveAllFeatures(w http.ResponseWriter, r *http.Request, body []byte) {
	const root = "/apis/nfd.k8s-sigs.io/v1alpha1"
	if r.Method == http.MethodGet {
		if r.URL.Path != root+"/nodefeatures" || f.allFeatures == nil {
			answer(w, http.StatusNotFound, "the server could not find the requested resource")
			return
		}
		var page metav1.PartialObjectMetadataList
		at, _ := strconv.Atoi(r.URL.Query().Get("continue"))
		if at < len(f.allFeatures) {
			page.Items = []metav1.PartialObjectMetadata{{ObjectMeta: f.allFeatures[at]}}
		}
		if at+1 < len(f.allFeatures) {
			page.Continue = strconv.Itoa(at + 1)
		}
		_ = json.NewEncoder(w).Encode(page)
		return
	}
	var options metav1.DeleteOptions
	if err := json.Unmarshal(body, &options); err != nil || options.Preconditions == nil || options.Preconditions.UID == nil {
		f.t.Errorf("DELETE %s with %s: %v, want the UID", r.URL.Path, body, err)
		answer(w, http.StatusBadRequest, "no UID")
		return
	}
	i := slices.IndexFunc(f.allFeatures, func(o metav1.ObjectMeta) bool {
		return r.URL.Path == root+"/namespaces/"+o.Namespace+"/nodefeatures/"+o.Name
	})
	switch {
	case i < 0:
		answer(w, http.StatusNotFound, "no such object")
	case f.allFeatures[i].UID != *options.Preconditions.UID:
		answer(w, http.StatusConflict, "another object")
	default:
		f.allFeatures = slices.Delete(f.allFeatures, i, i+1)
		_, _ = w.Write([]byte("{}"))
	}
}
