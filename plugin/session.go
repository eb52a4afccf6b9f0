package plugin

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// session is one listening socket and its gRPC server. The socket's name is used only
// once, so that a kubelet which tells plugins apart by their sockets
// (kubernetes#135437) never takes a new session for an old one.
type session struct {
	path string
	grpc *grpc.Server
	// events tells the session's registrar of streams that open and end.
	events chan streamEvent
	// stopping is closed when the session ends, so that streams do too.
	stopping chan struct{}
	// served is closed when the gRPC server has returned.
	served chan struct{}
}

type streamEvent int

const (
	streamOpened streamEvent = 1
	streamEnded  streamEvent = -1
)

// maxSocketName keeps the path under the 107 bytes of a Unix socket address in
// the kubelet's own directory.
const maxSocketName = 64

// socketName is unique for each session. It has the resource in it for people.
func socketName(resource string) string {
	readable := strings.ReplaceAll(resource, "/", "_")
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails, says its documentation
	suffix := "-" + hex.EncodeToString(random[:]) + ".sock"
	readable = readable[:min(len(readable), maxSocketName-len(socketPrefix)-len(suffix))]
	return socketPrefix + readable + suffix
}

const socketPrefix = "virgate-"

func (s *server) open() (*session, error) {
	path := filepath.Join(s.Dir, socketName(s.name))
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", s.name, err)
	}
	session := &session{
		path: path, grpc: grpc.NewServer(serverOptions()...),
		events: make(chan streamEvent), stopping: make(chan struct{}), served: make(chan struct{}),
	}
	api.RegisterDevicePluginServer(session.grpc, service{server: s, session: session})
	go func() {
		defer close(session.served)
		_ = session.grpc.Serve(netutil.LimitListener(listener, maxConnections)) // It fails when close has closed the listener.
	}()
	return session, nil
}

// Only root can connect to a session's socket, so simple bounds are enough to keep
// a client that has gone wrong from taking the node's memory.
const (
	// maxConnections counts all clients. The kubelet needs one connection; clients
	// beyond the limit wait until another one has gone.
	maxConnections = 4
	// maxStreams counts the calls of one connection. The kubelet has ListAndWatch
	// open and makes one call beside it.
	maxStreams = 2
	// maxHeaderBytes is far above the few hundred bytes that the kubelet sends.
	maxHeaderBytes = 16 << 10
	// maxRequestBytes has room for a request that names every device of the longest
	// list (sharing.MaxDevices) as available and again as required.
	maxRequestBytes = 4 << 20
	// maxIdle is how long a connection may stay open without a call, or without
	// saying that it speaks HTTP/2. Without it, idle clients could occupy all
	// connections for ever and the kubelet could not come back.
	maxIdle = 5 * time.Second
)

func serverOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(maxStreams), grpc.MaxHeaderListSize(maxHeaderBytes), grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.ConnectionTimeout(maxIdle), grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: maxIdle}),
	}
}

// close ends the streams, removes the socket, and returns when every handler has
// ended. Nobody needs to receive events any more.
func (s *session) close() {
	close(s.stopping)
	s.grpc.Stop()
	<-s.served
}

// report hands an event to the registrar; false when the session or stream has ended.
func (s *session) report(ctx context.Context, event streamEvent) bool {
	select {
	case s.events <- event:
		return true
	case <-s.stopping:
		return false
	case <-ctx.Done():
		return false
	}
}

// wiped says that the session's socket was removed, as the kubelet does with all
// sockets when it starts.
func (s *session) wiped() bool {
	_, err := os.Lstat(s.path)
	return errors.Is(err, os.ErrNotExist)
}

// registerTimeout is above the 10 s in which the kubelet dials back.
const registerTimeout = 15 * time.Second

// register asks the kubelet to connect to the session's socket.
func (s *server) register(ctx context.Context, session *session) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	connection, err := grpc.NewClient("passthrough:///kubelet",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", s.kubeletSocket)
		}))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", s.kubeletSocket, err)
	}
	defer func() { _ = connection.Close() }()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version:      api.Version,
		Endpoint:     filepath.Base(session.path),
		ResourceName: s.name,
	})
	if err != nil {
		return fmt.Errorf("register %s: %w", s.name, err)
	}
	return nil
}

// RemoveSockets removes the sockets that a Virgate which was killed has left in dir.
// Only the program that may serve the directory calls it, before it does.
func RemoveSockets(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, socketPrefix+"*.sock"))
	if err != nil {
		return fmt.Errorf("find sockets: %w", err)
	}
	var errs []error
	for _, path := range left {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}
