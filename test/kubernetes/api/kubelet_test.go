package api

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/portforward"
)

// portForwarder stands for the part of all kubelets that forwards ports. With the kubelet's own code, it
// forwards to ports of this machine's loopback as if that were each pod's.
type portForwarder struct{}

// forwardPorts starts it, and returns the Node status by which the API server finds it.
func forwardPorts(t *testing.T) (status string) {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		pod, found := strings.CutPrefix(r.URL.Path, "/portForward/")
		if !found {
			http.NotFound(w, r)
			return
		}
		const patience = 2 * time.Minute
		portforward.ServePortForward(w, r, portForwarder{}, pod, "", nil, patience, patience, portforward.SupportedProtocols)
	}))
	t.Cleanup(server.Close)
	port := server.Listener.Addr().(*net.TCPAddr).Port
	return fmt.Sprintf(`"addresses":[{"type":"InternalIP","address":"127.0.0.1"}],"daemonEndpoints":{"kubeletEndpoint":{"Port":%d}}`, port)
}

// PortForward connects a stream with a port.
func (portForwarder) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	go func() {
		_, _ = io.Copy(connection, stream)
		_ = connection.Close()
	}()
	_, _ = io.Copy(stream, connection)
	return nil
}
