package policy

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestEndlessAnswer: an answer without an end is given up, and costs no more
// memory than the longest that is read.
func TestEndlessAnswer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		block := bytes.Repeat([]byte("x"), 1<<20)
		for r.Context().Err() == nil {
			if _, err := w.Write(block); err != nil {
				return
			}
		}
	}))
	defer server.Close()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(`{kind: Config, apiVersion: v1, current-context: c,
contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u, user: {}}],
clusters: [{name: c, cluster: {server: "`+server.URL+`"}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	config, err := APIConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	api, err := NewAPI(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := api.core.Get().Resource("pods").DoRaw(ctx); err == nil || !strings.Contains(err.Error(), "longer than 33554432 bytes") {
		t.Errorf("got %v", err)
	}
}
