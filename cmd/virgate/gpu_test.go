package main

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/release"
)

// TestReleaseWithoutKubelet checks that on a machine without a kubelet the command says at once what to do, instead
// of waiting.
func TestReleaseWithoutKubelet(t *testing.T) {
	for _, test := range []struct{ name, waits, hint string }{
		{"holders unknown", release.HoldersUnknown + ": no such socket", "on a machine without a kubelet, end virgate run instead"},
		{"held", "default/first", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "s")
			listener, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_ = json.NewEncoder(w).Encode(release.Release{GPU: "GPU-a", State: release.Waiting, Waits: []string{test.waits}})
			}))
			_ = server.Listener.Close()
			server.Listener = listener
			server.Start()
			t.Cleanup(server.Close)
			var stdout, stderr strings.Builder
			code := run(t.Context(), []string{"virgate", "gpu", "release", "--gpu=0", "--wait=false", "--control-socket", socket},
				func(string) (string, bool) { return "", false }, &stdout, &stderr)
			if code != 1 || !strings.Contains(stdout.String(), test.waits) || !strings.Contains(stdout.String(), test.hint) ||
				strings.Contains(stdout.String(), "end virgate run") != (test.hint != "") {
				t.Errorf("exit code %d, %s%s", code, stdout.String(), stderr.String())
			}
		})
	}
}
