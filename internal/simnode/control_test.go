package simnode_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestCommand holds the way over the control socket, errors included.
func TestCommand(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	node := open(t, "mixed")
	server := httptest.NewUnstartedServer(node.Handler())
	must(t, server.Listener.Close())
	server.Listener = listener
	server.Start()
	t.Cleanup(server.Close)

	ctx := context.Background()
	must(t, simnode.Command(ctx, socket, "lose", map[string]string{"gpu": "5"}))
	if _, err := node.DeviceGetHandleByIndex(5); returned(err) != nvml.GPUIsLost {
		t.Errorf("the board is not lost: %v", err)
	}
	want := node.Do("lose", map[string]string{"gpu": "9"})
	if err := simnode.Command(ctx, socket, "lose", map[string]string{"gpu": "9"}); err == nil || err.Error() != want.Error() {
		t.Errorf("error %v, want the node's: %v", err, want)
	}
	if err := simnode.Command(ctx, socket, "a/b?c", nil); err == nil || !strings.Contains(err.Error(), `no verb "a/b?c"`) {
		t.Errorf("strange verb: %v", err)
	}
	if err := simnode.Command(ctx, socket+"x", "lose", nil); err == nil || !strings.Contains(err.Error(), socket+"x") {
		t.Errorf("no socket: %v", err)
	}
}

func TestHandler(t *testing.T) {
	tests := []struct {
		name, method, target, body string
		want                       int
	}{
		{"query", "POST", "/sim/xid?gpu=0&code=79", "", http.StatusNoContent},
		{"form", "POST", "/sim/xid", "gpu=0&code=79", http.StatusNoContent},
		{"query and form", "POST", "/sim/xid?gpu=0", "code=79", http.StatusNoContent},
		{"wrong argument", "POST", "/sim/xid?gpu=0&code=x", "", http.StatusBadRequest},
		{"argument twice", "POST", "/sim/xid?gpu=0&gpu=1&code=79", "", http.StatusBadRequest},
		{"no form", "POST", "/sim/xid?gpu=%", "", http.StatusBadRequest},
		{"long body", "POST", "/sim/xid", "gpu=" + strings.Repeat("0", 1<<17) + "&code=79", http.StatusBadRequest},
		{"no verb", "POST", "/sim/explode", "", http.StatusNotFound},
		{"reading", "GET", "/sim/xid?gpu=0&code=79", "", http.StatusMethodNotAllowed},
		{"elsewhere", "POST", "/xid", "", http.StatusNotFound},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			request := httptest.NewRequest(test.method, test.target, strings.NewReader(test.body))
			request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			answer := httptest.NewRecorder()
			open(t, "t4").Handler().ServeHTTP(answer, request)
			if answer.Code != test.want {
				t.Errorf("status %d, want %d: %s", answer.Code, test.want, answer.Body)
			}
		})
	}
}
