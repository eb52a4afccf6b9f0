package main

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
)

const (
	nodeName                 = "node-1"
	namespace, configMapName = "gpu", "profiles"
)

// apiServer answers as the API server of a cluster does in which nothing
// changes: over TLS and HTTP/2, in protobuf, with watches that stay open. What
// is written to it is accepted and forgotten.
type apiServer struct {
	*httptest.Server
	encoder runtime.Encoder
	// documents are the ConfigMap's.
	documents map[string]string
}

func newAPIServer(documents map[string]string) (*apiServer, error) {
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("make an API server: %w", err)
	}
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		return nil, fmt.Errorf("make an API server: %w", err)
	}
	s := &apiServer{encoder: protobuf.NewSerializer(scheme, scheme), documents: documents}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/nodes", s.follow(s.node))
	mux.HandleFunc("GET /api/v1/namespaces/"+namespace+"/configmaps", s.follow(s.configMaps))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Node", "apiVersion": "v1", "metadata": map[string]any{"name": nodeName}})
	})
	s.Server = httptest.NewUnstartedServer(mux)
	s.EnableHTTP2 = true
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	return s, nil
}

// follow answers a list, and a watch with nothing until the client goes.
func (s *apiServer) follow(list func() runtime.Object) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
			_ = s.encoder.Encode(list(), w)
			return
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

func (s *apiServer) node() runtime.Object {
	return &metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"},
		ListMeta: metav1.ListMeta{ResourceVersion: "1"},
		Items: []metav1.PartialObjectMetadata{{
			TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
			ObjectMeta: metav1.ObjectMeta{
				Name: nodeName, UID: "00000000-0000-4000-8000-000000000001", ResourceVersion: "1",
				Labels: map[string]string{"nvidia.com/device-plugin.config": "shared"},
			},
		}},
	}
}

func (s *apiServer) configMaps() runtime.Object {
	return &corev1.ConfigMapList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMapList"},
		ListMeta: metav1.ListMeta{ResourceVersion: "1"},
		Items: []corev1.ConfigMap{{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: configMapName, ResourceVersion: "1"},
			Data:       s.documents,
		}},
	}
}

// kubeconfig writes how the server is reached.
func (s *apiServer) kubeconfig(path string) error {
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: speed
clusters: [{name: speed, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: speed, user: {token: speed}}]
contexts: [{name: speed, context: {cluster: speed, user: speed}}]
`, s.URL, base64.StdEncoding.EncodeToString(authority))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	return nil
}
