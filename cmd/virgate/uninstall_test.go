package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestUninstallNodeFeature removes the Node's NodeFeature or, without the right to, reports that it may be left,
// and goes on with the Node, as in the chart's pod.
func TestUninstallNodeFeature(t *testing.T) {
	const list, object = "/apis/nfd.k8s-sigs.io/v1alpha1/nodefeatures", "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gpu/nodefeatures/virgate-features-for-n1"
	for _, test := range []struct {
		name   string
		status int
		want   string
		code   int
	}{
		{"removed", 200, "removed NodeFeature gpu/virgate-features-for-n1\nnode n1: removed annotation virgate.github.io/profile\n", 0},
		{"forbidden", 403, "go with the DaemonSet that wrote them, are left: list NodeFeatures: ", 0},
		{"broken", 500, "node n1: removed annotation virgate.github.io/profile\n", 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				switch r.Method + " " + r.URL.Path {
				case "GET " + list:
					w.WriteHeader(test.status)
					_, _ = fmt.Fprint(w, `{"items": [{"metadata": {"name": "virgate-features-for-n1", "namespace": "gpu", "uid": "u", "managedFields": [{"manager": "virgate"}]}}]}`)
				case "GET /api/v1/nodes/n1":
					_, _ = fmt.Fprint(w, `{"metadata": {"name": "n1", "annotations": {"virgate.github.io/profile": "a"}}}`)
				case "DELETE " + object, "PATCH /api/v1/nodes/n1":
					_, _ = fmt.Fprint(w, "{}")
				default:
					t.Errorf("%s %s", r.Method, r.URL.Path)
				}
			}))
			defer server.Close()
			kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
			text := "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n" +
				"clusters: [{name: c, cluster: {server: " + server.URL + "}}]\nusers: [{name: u, user: {}}]\n"
			if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			var stdout, stderr bytes.Buffer
			code := run(t.Context(), []string{"virgate", "uninstall", "--node=n1", "--kubeconfig", kubeconfig}, func(string) (string, bool) { return "", false }, &stdout, &stderr)
			if code != test.code || !strings.Contains(stdout.String(), test.want) || !strings.Contains(stdout.String(), "node n1: removed ") {
				t.Errorf("exit code %d, want %d and %q:\n%s%s", code, test.code, test.want, stdout.String(), stderr.String())
			}
		})
	}
}
