package main

import (
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/simnode"
)

// TestCallControl sends commands to a simulated node over the control socket.
func TestCallControl(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	node, err := simnode.New("t4")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(node.Handler())
	_ = server.Listener.Close()
	server.Listener = listener
	server.Start()
	t.Cleanup(server.Close)
	post := func(socket, gpu string) error {
		cmd := &cli.Command{Flags: []cli.Flag{flagTable.Of(nil, "client/control-socket")[0]}}
		if err := cmd.Run(t.Context(), []string{"virgate", "--control-socket", socket}); err != nil {
			return err
		}
		_, err := callControl(t.Context(), cmd, http.MethodPost, "/sim/lose", url.Values{"gpu": {gpu}})
		return err
	}

	if err := post(socket, "0"); err != nil || !node.GPUs()[0].Lost {
		t.Errorf("the GPU is not lost: %v", err)
	}
	want := node.Do("lose", map[string]string{"gpu": "9"})
	if err := post(socket, "9"); err == nil || err.Error() != want.Error() {
		t.Errorf("error %v, want the node's: %v", err, want)
	}
	if err := post(socket+"x", "0"); err == nil || !strings.Contains(err.Error(), socket+"x") {
		t.Errorf("no socket: %v", err)
	}
}
