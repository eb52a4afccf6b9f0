package rollout

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/test/await"
)

// patience is how long a test waits; the machine may be busy.
const patience = await.Patience

// event is a watch event.
type event struct {
	Type   string `json:"type"`
	Object any    `json:"object"`
	at     int
	// path is the path of the object's list, name the object's name.
	path, name string
}

// namespace is Virgate's, where rollouts are kept.
const namespace = "virgate"

const nodesPath, configMapsPath = "/api/v1/nodes", "/api/v1/namespaces/" + namespace + "/configmaps"

// api is an API server with Nodes and the ConfigMaps of one namespace. It refuses a patch of an outdated version,
// sends watch events, and calls follow when a Node's label changes.
type api struct {
	t   testing.TB
	url string
	// before is called before each write, with the object's name and the body; on false, the request gets the status
	// refusal. lost, called after a write, drops the response. Both may be nil.
	before  func(name string, body string) bool
	refusal int
	lost    func(name string, body string) bool
	// follow is called after a patch for each Node whose label of that name has changed; its changes are a separate
	// write. With nil, nodes do not react.
	follow func(n *corev1.Node, label string)

	mutex      sync.Mutex
	changed    *sync.Cond
	nodes      map[string]corev1.Node
	configMaps map[string]corev1.ConfigMap
	version    int
	events     []event
	closed     bool
	// labelled are the names of nodes whose label was changed, in order.
	labelled []string
}

// startNodes are Nodes that have, and report, the profile old.
func startNodes(names ...string) map[string]corev1.Node {
	nodes := map[string]corev1.Node{}
	for _, name := range names {
		nodes[name] = corev1.Node{
			ObjectMeta: metav1.ObjectMeta{
				Name: name, ResourceVersion: "1", Labels: map[string]string{"pool": "a", ProfileLabel: "old", nodestatus.StateLabel: "applied"},
				Annotations: map[string]string{nodestatus.ProfileAnnotation: "old", "mine": "stays"},
			},
			Status: corev1.NodeStatus{
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}, {Type: nodestatus.ConditionType, Status: corev1.ConditionTrue, Reason: "Serving"}},
				Capacity:   quantities(8), Allocatable: quantities(8),
			},
		}
	}
	return nodes
}

func startAPI(t testing.TB, names ...string) *api {
	a := &api{t: t, nodes: startNodes(names...), configMaps: map[string]corev1.ConfigMap{}, version: 100, follow: obey}
	a.changed = sync.NewCond(&a.mutex)
	server := httptest.NewServer(a)
	a.url = server.URL
	t.Cleanup(func() {
		a.mutex.Lock()
		a.closed = true
		a.changed.Broadcast()
		a.mutex.Unlock()
		server.Close()
	})
	return a
}

func quantities(count int64) corev1.ResourceList {
	return corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(count, resource.DecimalSI)}
}

// obey has the node apply its profile at once, and report it.
func obey(n *corev1.Node, label string) {
	if label == LayoutLabel {
		n.Labels[nodestatus.MIGStateLabel] = "success"
		n.Annotations[nodestatus.GenerationAnnotation] = "g-" + n.Labels[label]
		return
	}
	n.Labels[nodestatus.StateLabel] = "applied"
	n.Annotations[nodestatus.ProfileAnnotation] = n.Labels[label]
	beat(n)
}

func beat(n *corev1.Node) {
	c := &n.Status.Conditions[1]
	c.LastHeartbeatTime = metav1.Time{Time: c.LastHeartbeatTime.Add(time.Minute)}
}

// refuse has the node keep its profile, and report that.
func refuse(n *corev1.Node, _ string) {
	n.Labels[nodestatus.StateLabel] = "rejected"
	n.Status.Conditions[1].Reason, n.Status.Conditions[1].Message = "ProfileRejected", "there is no such profile"
	beat(n)
}

func (a *api) client(holder string) *Client {
	a.t.Helper()
	c, err := NewClient(&rest.Config{Host: a.url}, namespace, holder)
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// put stores the Node as a new version and sends an event; the caller holds the mutex.
func (a *api) put(n corev1.Node, kind string) corev1.Node {
	a.version++
	n.ResourceVersion = strconv.Itoa(a.version)
	if kind == "DELETED" {
		delete(a.nodes, n.Name)
	} else {
		a.nodes[n.Name] = n
	}
	n.TypeMeta = metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}
	a.events = append(a.events, event{kind, n, a.version, nodesPath, n.Name})
	a.changed.Broadcast()
	return n
}

// keep is put for a ConfigMap.
func (a *api) keep(object corev1.ConfigMap, kind string) corev1.ConfigMap {
	a.version++
	object.ResourceVersion = strconv.Itoa(a.version)
	object.TypeMeta = metav1.TypeMeta{Kind: "ConfigMap", APIVersion: "v1"}
	if kind == "DELETED" {
		delete(a.configMaps, object.Name)
	} else {
		a.configMaps[object.Name] = object
	}
	a.events = append(a.events, event{kind, object, a.version, configMapsPath, object.Name})
	a.changed.Broadcast()
	return object
}

// touch makes a new version of the object, like a write by another client.
func (a *api) touch(name string) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if object, found := a.configMaps[name]; found {
		a.keep(object, "MODIFIED")
	}
	if n, found := a.nodes[name]; found {
		n = *n.DeepCopy()
		beat(&n)
		a.put(n, "MODIFIED")
	}
}

// editState changes the rollout's state, like another client.
func (a *api) editState(id string, change func(s *State)) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	object := a.configMaps[planName+id]
	p, err := planOf(&object)
	if err != nil {
		a.t.Error(err)
		return
	}
	change(&p.State)
	object = *object.DeepCopy()
	object.Data[headKey] = encode(p.State)
	a.keep(object, "MODIFIED")
}

// edit changes a Node, like another client.
func (a *api) edit(name string, change func(n *corev1.Node)) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	n := a.nodes[name]
	n = *n.DeepCopy()
	change(&n)
	a.put(n, "MODIFIED")
}

// node is the current Node.
func (a *api) node(name string) corev1.Node {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.nodes[name]
}

// intercept has before called for each patch from now on; nil disables it.
func (a *api) intercept(before func(node, body string) bool) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.before = before
}

// behave has nodes follow like this from now on.
func (a *api) behave(follow func(n *corev1.Node, label string)) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.follow = follow
}

func (a *api) removeConfigMap(name string) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.keep(a.configMaps[name], "DELETED")
}

func (a *api) remove(name string) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.put(a.nodes[name], "DELETED")
}

// labels are the label's values by node; "" without one.
func (a *api) labels(name string) map[string]string {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	values := map[string]string{}
	for node, n := range a.nodes {
		values[node] = n.Labels[name]
	}
	return values
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	path := nodesPath
	if strings.HasPrefix(r.URL.Path, configMapsPath) {
		path = configMapsPath
	}
	name := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, path), "/")
	switch {
	case r.Method == http.MethodGet && r.URL.Query().Get("watch") != "":
		a.watch(w, r, path)
	case r.Method == http.MethodGet:
		a.read(w, r, path, name)
	default:
		a.change(w, r, path, name)
	}
}

// change answers a request that writes.
func (a *api) change(w http.ResponseWriter, r *http.Request, path, name string) {
	data, err := io.ReadAll(r.Body)
	body := map[string]any{}
	if err == nil {
		err = json.Unmarshal(data, &body)
	}
	want := map[string]string{http.MethodPatch: "application/merge-patch+json"}
	if got := r.Header.Get("Content-Type"); err != nil || got != cmp.Or(want[r.Method], "application/json") {
		a.t.Errorf("%s %s: %v, %s", r.Method, r.URL.Path, err, got)
	}
	if got := r.URL.Query().Get("fieldManager"); got != fieldManager && r.Method != http.MethodDelete {
		a.t.Errorf("%s %s: field manager %q", r.Method, r.URL.Path, got)
	}
	metadata, _ := body["metadata"].(map[string]any)
	if r.Method == http.MethodPost {
		name, _ = metadata["name"].(string)
	}
	text := fmt.Sprint(body)
	a.mutex.Lock()
	before := a.before
	a.mutex.Unlock()
	if before != nil && !before(name, text) {
		if a.refusal == http.StatusForbidden {
			status(w, a.refusal, metav1.StatusReasonForbidden)
		} else {
			status(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
		}
		return
	}
	var object any
	var code int
	var reason metav1.StatusReason
	if path == nodesPath {
		object, code, reason = a.patch(name, body)
	} else {
		object, code, reason = a.write(r.Method, name, data, body)
	}
	switch {
	case code != http.StatusOK:
		status(w, code, reason)
	case a.lost != nil && a.lost(name, text):
		status(w, http.StatusInternalServerError, metav1.StatusReasonInternalError)
	default:
		_ = json.NewEncoder(w).Encode(object)
	}
}

// read answers a get or a list.
func (a *api) read(w http.ResponseWriter, r *http.Request, path, name string) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if name != "" {
		var object any
		n, found := a.nodes[name]
		n.TypeMeta = metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}
		object = n
		if path == configMapsPath {
			object, found = a.configMaps[name], a.configMaps[name].Name != ""
		}
		if !found {
			status(w, http.StatusNotFound, metav1.StatusReasonNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(object)
		return
	}
	if path == configMapsPath {
		list := corev1.ConfigMapList{TypeMeta: metav1.TypeMeta{Kind: "ConfigMapList", APIVersion: "v1"}}
		list.ResourceVersion = strconv.Itoa(a.version)
		for _, name := range slices.Sorted(maps.Keys(a.configMaps)) {
			object := a.configMaps[name]
			if object.Labels[r.URL.Query().Get("labelSelector")] != "" || asked(r, name) {
				list.Items = append(list.Items, object)
			}
		}
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	list := corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}}
	list.ResourceVersion = strconv.Itoa(a.version)
	for _, name := range slices.Sorted(maps.Keys(a.nodes)) {
		list.Items = append(list.Items, a.nodes[name])
	}
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	limit, _ := strconv.Atoi(r.URL.Query().Get("limit"))
	if limit > 0 && from+limit < len(list.Items) {
		list.Continue = strconv.Itoa(from + limit)
		list.Items = list.Items[:from+limit]
	}
	list.Items = list.Items[from:]
	_ = json.NewEncoder(w).Encode(list)
}

// asked reports whether the field selector names the object.
func asked(r *http.Request, name string) bool {
	return r.URL.Query().Get("fieldSelector") == "metadata.name="+name
}

// write creates, patches or deletes a ConfigMap.
func (a *api) write(method, name string, data []byte, body map[string]any) (object any, code int, reason metav1.StatusReason) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	was, found := a.configMaps[name]
	part, _ := body["metadata"].(map[string]any)
	if method == http.MethodDelete {
		part, _ = body["preconditions"].(map[string]any)
	}
	switch {
	case method == http.MethodPost && found:
		return nil, http.StatusConflict, metav1.StatusReasonAlreadyExists
	case method == http.MethodPost:
		var created corev1.ConfigMap
		if err := json.Unmarshal(data, &created); err != nil {
			a.t.Error(err)
		}
		return a.keep(created, "ADDED"), http.StatusOK, ""
	case !found:
		return nil, http.StatusNotFound, metav1.StatusReasonNotFound
	case part["resourceVersion"] != was.ResourceVersion:
		return nil, http.StatusConflict, metav1.StatusReasonConflict
	case method == http.MethodDelete:
		return a.keep(was, "DELETED"), http.StatusOK, ""
	}
	changed := *was.DeepCopy()
	merge(changed.Data, body["data"])
	return a.keep(changed, "MODIFIED"), http.StatusOK, ""
}

func status(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: reason, Code: int32(code), Message: string(reason)})
}

// patch makes a merge patch of labels and annotations.
func (a *api) patch(name string, body map[string]any) (corev1.Node, int, metav1.StatusReason) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	was, found := a.nodes[name]
	metadata, _ := body["metadata"].(map[string]any)
	switch {
	case !found:
		return was, http.StatusNotFound, metav1.StatusReasonNotFound
	case metadata["resourceVersion"] != was.ResourceVersion:
		return was, http.StatusConflict, metav1.StatusReasonConflict
	}
	n := *was.DeepCopy()
	merge(n.Labels, metadata["labels"])
	merge(n.Annotations, metadata["annotations"])
	n = a.put(n, "MODIFIED")
	for _, label := range []string{ProfileLabel, LayoutLabel} {
		if n.Labels[label] != was.Labels[label] {
			a.labelled = append(a.labelled, name)
			if a.follow != nil {
				later := *n.DeepCopy()
				a.follow(&later, label)
				a.put(later, "MODIFIED")
			}
		}
	}
	return n, http.StatusOK, ""
}

// merge is a merge patch of a map.
func merge(into map[string]string, changes any) {
	values, _ := changes.(map[string]any)
	for key, value := range values {
		if value == nil {
			delete(into, key)
		} else {
			into[key] = value.(string)
		}
	}
}

func (a *api) watch(w http.ResponseWriter, r *http.Request, path string) {
	from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil {
		a.t.Errorf("a watch from %q", r.URL.Query().Get("resourceVersion"))
	}
	flusher, _ := w.(http.Flusher)
	flusher.Flush()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-r.Context().Done():
			a.mutex.Lock()
			defer a.mutex.Unlock()
			a.changed.Broadcast()
		case <-stop:
		}
	}()
	for {
		a.mutex.Lock()
		next := func() int {
			return slices.IndexFunc(a.events, func(e event) bool {
				return e.at > from && e.path == path && (path == nodesPath || asked(r, e.name))
			})
		}
		for next() < 0 && !a.closed && r.Context().Err() == nil {
			a.changed.Wait()
		}
		if a.closed || r.Context().Err() != nil {
			a.mutex.Unlock()
			return
		}
		e := a.events[next()]
		a.mutex.Unlock()
		if json.NewEncoder(w).Encode(e) != nil {
			return
		}
		flusher.Flush()
		from = e.at
	}
}
