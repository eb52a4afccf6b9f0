package scenario

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/test/await"
)

// nodeName is the only Node of an apiServer.
const nodeName = "n1"

// apiServer is the part of an API server that the program needs to follow its Node's labels, to change one
// of them and to write the Node's conditions. It accepts and ignores all other writes.
type apiServer struct {
	*httptest.Server
	mu         sync.Mutex
	node       metav1.PartialObjectMetadata
	version    int
	changed    chan struct{}
	away       bool
	conditions map[corev1.NodeConditionType]corev1.NodeCondition
}

func newAPIServer() *apiServer {
	s := &apiServer{version: 1, changed: make(chan struct{}), conditions: map[corev1.NodeConditionType]corev1.NodeCondition{}}
	s.node.TypeMeta = metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"}
	s.node.Name, s.node.UID, s.node.ResourceVersion, s.node.Labels = nodeName, "1", "1", map[string]string{}
	s.Server = httptest.NewServer(s)
	return s
}

// label sets labels, each as KEY=VALUE, or KEY- to remove one.
func (s *apiServer) label(labels []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.relabel(labels...)
}

// relabel is label for callers that hold the lock.
func (s *apiServer) relabel(labels ...string) error {
	next := map[string]string{}
	for key, value := range s.node.Labels {
		next[key] = value
	}
	for _, label := range labels {
		key, value, set := strings.Cut(label, "=")
		removed, remove := strings.CutSuffix(label, "-")
		switch {
		case set:
			next[key] = value
		case remove:
			delete(next, removed)
		default:
			return errUsage
		}
	}
	s.version++
	s.node.Labels, s.node.ResourceVersion = next, strconv.Itoa(s.version)
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// setAway makes the server refuse all requests and end its watches.
func (s *apiServer) setAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
	close(s.changed)
	s.changed = make(chan struct{})
}

// condition returns the Node's condition of that type.
func (s *apiServer) condition(kind corev1.NodeConditionType) corev1.NodeCondition {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conditions[kind]
}

// ServeHTTP implements http.Handler.
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	answer := func(body any) { _ = json.NewEncoder(w).Encode(body) }
	switch {
	case s.away:
		http.Error(w, "away", http.StatusServiceUnavailable)
	case r.URL.Path == "/api/v1/nodes" && r.URL.Query().Get("watch") == "":
		answer(metav1.PartialObjectMetadataList{
			TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"},
			ListMeta: metav1.ListMeta{ResourceVersion: s.node.ResourceVersion},
			Items:    []metav1.PartialObjectMetadata{s.node},
		})
	case r.URL.Path == "/api/v1/nodes":
		s.watch(w, r)
	case strings.HasSuffix(r.URL.Path, "/status") && r.Method == http.MethodPatch:
		var patch corev1.Node
		if json.NewDecoder(r.Body).Decode(&patch) == nil {
			for _, c := range patch.Status.Conditions {
				s.conditions[c.Type] = c
			}
		}
		answer(s.node)
	case r.Method == http.MethodPatch && r.Header.Get("Content-Type") == string(types.JSONPatchType):
		if err := s.patchLabel(r.Body); err != nil {
			w.WriteHeader(http.StatusUnprocessableEntity)
			answer(metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonInvalid, Code: http.StatusUnprocessableEntity, Message: err.Error()})
			return
		}
		answer(s.node)
	case r.Method == http.MethodGet && !strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata"):
		answer(corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: s.node.ObjectMeta})
	case r.Method == http.MethodPost:
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	default:
		answer(s.node)
	}
}

// patchLabel applies a JSON patch that compares a label and replaces it.
func (s *apiServer) patchLabel(body io.Reader) error {
	var operations []struct{ Op, Path, Value string }
	if err := json.NewDecoder(body).Decode(&operations); err != nil {
		return err
	}
	if len(operations) != 2 || operations[0].Op != "test" || operations[1].Op != "replace" || operations[0].Path != operations[1].Path {
		return fmt.Errorf("the patch %v", operations)
	}
	key := strings.NewReplacer("~1", "/", "~0", "~").Replace(strings.TrimPrefix(operations[0].Path, "/metadata/labels/"))
	if value, there := s.node.Labels[key]; !there || value != operations[0].Value {
		return fmt.Errorf("%s is %q", operations[0].Path, value)
	}
	return s.relabel(key + "=" + operations[1].Value)
}

// watch sends the Node whenever it differs from the last one sent.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request) {
	sent := r.URL.Query().Get("resourceVersion")
	w.WriteHeader(http.StatusOK)
	flusher, _ := w.(http.Flusher)
	for r.Context().Err() == nil && !s.away {
		if sent != s.node.ResourceVersion {
			sent = s.node.ResourceVersion
			if json.NewEncoder(w).Encode(map[string]any{"type": "MODIFIED", "object": s.node}) != nil {
				return
			}
		}
		flusher.Flush()
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-r.Context().Done():
		}
		s.mu.Lock()
	}
}

// labelNode starts the API server first.
func (c *call) labelNode() error {
	if c.api == nil {
		c.api = newAPIServer()
		config := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "current-context": "x",
"clusters": [{"name": "c", "cluster": {"server": %q}}], "users": [{"name": "u", "user": {}}],
"contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}]}`, c.api.URL)
		if err := os.WriteFile(filepath.Join(c.home, "kubeconfig"), []byte(config), 0o600); err != nil {
			return err
		}
	}
	if len(c.arguments) == 1 && (c.arguments[0] == "away" || c.arguments[0] == "back") {
		c.api.setAway(c.arguments[0] == "away")
		return nil
	}
	return c.api.label(c.arguments)
}

// labelled waits until the Node has these labels, each as KEY=VALUE.
func (c *call) labelled() error {
	if c.api == nil || len(c.arguments) == 0 {
		return errUsage
	}
	return await.Condition(nil, func() error {
		c.api.mu.Lock()
		defer c.api.mu.Unlock()
		for _, label := range c.arguments {
			key, value, _ := strings.Cut(label, "=")
			if got := c.api.node.Labels[key]; got != value {
				return fmt.Errorf("the label %s is %q, want %q", key, got, value)
			}
		}
		return nil
	})
}

// awaitCondition waits until the Node's condition has the given values.
func (c *call) awaitCondition() error {
	status, reason := c.take(), c.take()
	message, err := regexp.Compile(c.take())
	if err != nil || len(c.arguments) > 0 || c.api == nil {
		return errUsage
	}
	return await.Condition(nil, func() error {
		got := c.api.condition("GPUSharingReady")
		if string(got.Status) != status || got.Reason != reason || !message.MatchString(got.Message) {
			return fmt.Errorf("the condition is %s %s: %s", got.Status, got.Reason, got.Message)
		}
		return nil
	})
}

// unload has the simulated driver unloaded and loaded, as soon as no process has it open.
func (c *call) unload() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	return await.Condition(nil, func() error {
		return c.script.Exec(c.binary, "sim", "--control-socket", p.control, "reload")
	})
}
