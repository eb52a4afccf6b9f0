package agent

import (
	"context"
	"net"
	"net/http"
	"time"
)

// ServeControl answers orders on the control socket until ctx ends. The socket
// is the only way to change a running Virgate, so who may connect to it is the
// listener's business.
func ServeControl(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, MaxHeaderBytes: 16 << 10}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	return server.Serve(listener)
}
