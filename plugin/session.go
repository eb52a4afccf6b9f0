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

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// session is one listening socket and its gRPC server. Its name is used once:
// the kubelet that keys plugins by socket (kubernetes#135437) then never takes
// a new session for an old one.
type session struct {
	path string
	grpc *grpc.Server
	// events tells the session's owner of streams that open and end.
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

// socketName is unique for each session; the resource in it is for people.
func socketName(resource string) string {
	readable := strings.ReplaceAll(resource, "/", "_")
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails, says its documentation
	suffix := "-" + hex.EncodeToString(random[:]) + ".sock"
	readable = readable[:min(len(readable), maxSocketName-len(socketPrefix)-len(suffix))]
	return socketPrefix + readable + suffix
}

const socketPrefix = "virgate-"

// open starts to listen and to serve.
func (s *server) open() (*session, error) {
	path := filepath.Join(s.dir, socketName(s.name))
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", s.name, err)
	}
	session := &session{
		path: path, grpc: grpc.NewServer(append(limits(), grpc.WaitForHandlers(true))...),
		events: make(chan streamEvent), stopping: make(chan struct{}), served: make(chan struct{}),
	}
	api.RegisterDevicePluginServer(session.grpc, service{server: s, session: session})
	go func() {
		defer close(session.served)
		_ = session.grpc.Serve(LimitConnections(listener, mostConnections)) // It fails when close has closed the listener.
	}()
	return session, nil
}

const (
	// mostConnections is how many one socket has open: the kubelet needs one, and
	// a second while it dials back.
	mostConnections = 8
	// mostCalls is how many one connection has under way: the kubelet has its
	// stream and one call. More wait for their turn with the client.
	mostCalls = 16
	// mostHeaders is in bytes; the kubelet sends a few hundred.
	mostHeaders = 16 << 10
)

// limits are what keeps a flood of calls from taking the node's memory, with
// gRPC's own bound of 4 MiB for a message.
func limits() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(newIntroducing()), grpc.ForceServerCodecV2(newFrugal()),
		grpc.MaxConcurrentStreams(mostCalls), grpc.MaxHeaderListSize(mostHeaders),
	}
}

// close ends the streams, removes the socket, and returns when every handler
// has ended. The owner reads no events any more.
func (s *session) close() {
	close(s.stopping)
	s.grpc.Stop()
	<-s.served
}

// report hands an event to the session's owner; false when the session or the
// stream is over.
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

// wiped says that somebody removed the session's socket, as the kubelet does
// with all sockets when it starts.
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

// RemoveSockets removes what a Virgate that did not end by itself has left in
// dir. Only the one that may serve the directory calls it, before it does.
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
