package soak

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	nodeName      = "soak"
	configMapName = "gpu/profiles"
	profileLabel  = "nvidia.com/device-plugin.config"
	layoutLabel   = "nvidia.com/mig.config"
)

// cluster is as much of an API server as Virgate asks: a Node and a ConfigMap
// that can be listed and watched. What is written to it is accepted and
// forgotten.
type cluster struct {
	server *httptest.Server

	mu      sync.Mutex
	version int
	// forgotten is the version before which no watch can begin.
	forgotten int
	away      bool
	labels    map[string]string
	documents map[string]string
	history   []change
	// moved is closed and made anew at every change, broken when all connections
	// are to end.
	moved, broken chan struct{}
}

// change is an object as it was from a version on.
type change struct {
	version  int
	resource string
	object   any
}

func newCluster(t *testing.T, dir string) (*cluster, string) {
	t.Helper()
	c := &cluster{
		version: 1, labels: map[string]string{}, documents: map[string]string{},
		moved: make(chan struct{}), broken: make(chan struct{}),
	}
	c.server = httptest.NewServer(c)
	t.Cleanup(func() {
		c.cut()
		c.server.Close()
	})
	kubeconfig := filepath.Join(dir, "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: soak\n"+
		"clusters: [{name: soak, cluster: {server: %q}}]\ncontexts: [{name: soak, context: {cluster: soak, user: soak}}]\n"+
		"users: [{name: soak, user: {}}]\n", c.server.URL)
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return c, kubeconfig
}

// setLabel sets a label of the Node; "" removes it.
func (c *cluster) setLabel(name, value string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.labels, name)
	if value != "" {
		c.labels[name] = value
	}
	c.record("nodes")
}

func (c *cluster) setDocument(name, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.documents[name] = text
	c.record("configmaps")
}

func (c *cluster) record(resource string) {
	c.version++
	c.history = append(c.history, change{c.version, resource, c.object(resource)})
	close(c.moved)
	c.moved = make(chan struct{})
}

// cut breaks every connection and answers nobody until mend.
func (c *cluster) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = true
	close(c.broken)
	c.broken = make(chan struct{})
}

func (c *cluster) mend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = false
}

// expire ends every watch, and none can go on from where it was.
func (c *cluster) expire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	c.forgotten, c.history = c.version, nil
	close(c.broken)
	c.broken = make(chan struct{})
}

// object is the one object of the resource, as it is now.
func (c *cluster) object(resource string) any {
	version := strconv.Itoa(c.version)
	if resource == "nodes" {
		labels := map[string]string{}
		for name, value := range c.labels {
			labels[name] = value
		}
		return metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
			ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "soak", ResourceVersion: version, Labels: labels},
		}
	}
	documents := map[string]string{}
	for name, text := range c.documents {
		documents[name] = text
	}
	return corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: "profiles", UID: "profiles", ResourceVersion: version},
		Data:       documents,
	}
}

// ServeHTTP implements http.Handler.
func (c *cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	away := c.away
	c.mu.Unlock()
	if away {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	resource := "configmaps"
	if strings.HasPrefix(r.URL.Path, "/api/v1/nodes") {
		resource = "nodes"
	}
	switch {
	case r.Method != http.MethodGet:
		_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 1<<20))
		c.mu.Lock()
		object := c.object("nodes")
		c.mu.Unlock()
		_ = json.NewEncoder(w).Encode(object)
	case r.URL.Path == "/api/v1/nodes/"+nodeName:
		_ = json.NewEncoder(w).Encode(corev1.Node{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "soak"},
		})
	case r.URL.Query().Get("watch") != "":
		c.watch(w, r, resource)
	default:
		c.list(w, resource)
	}
}

func (c *cluster) list(w http.ResponseWriter, resource string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := map[string]any{
		"apiVersion": "v1", "kind": "ConfigMapList",
		"metadata": map[string]string{"resourceVersion": strconv.Itoa(c.version)},
		"items":    []any{c.object(resource)},
	}
	if resource == "nodes" {
		list["apiVersion"], list["kind"] = "meta.k8s.io/v1", "PartialObjectMetadataList"
	}
	_ = json.NewEncoder(w).Encode(list)
}

// watch sends what happened after the version that was asked for, and goes on.
func (c *cluster) watch(w http.ResponseWriter, r *http.Request, resource string) {
	from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	if from < c.forgotten {
		c.mu.Unlock()
		w.WriteHeader(http.StatusGone)
		_ = json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
			Status:   metav1.StatusFailure, Reason: metav1.StatusReasonExpired, Code: http.StatusGone, Message: "too old",
		})
		return
	}
	broken := c.broken
	c.mu.Unlock()
	encoder, flush := json.NewEncoder(w), http.NewResponseController(w).Flush
	for {
		c.mu.Lock()
		var news []change
		for _, change := range c.history {
			if change.version > from && change.resource == resource {
				news = append(news, change)
			}
		}
		moved := c.moved
		c.mu.Unlock()
		for _, change := range news {
			if err := encoder.Encode(map[string]any{"type": "MODIFIED", "object": change.object}); err != nil {
				return
			}
			from = change.version
		}
		if err := flush(); err != nil {
			return
		}
		select {
		case <-moved:
		case <-broken:
			panic(http.ErrAbortHandler)
		case <-r.Context().Done():
			return
		}
	}
}
