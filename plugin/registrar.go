package plugin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"k8s.io/apimachinery/pkg/util/wait"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/internal/wake"
)

// registrar keeps one session registered. There is only one stream at a time, and never a
// registration while a stream is open: the end of either stream would make the kubelet drop the
// other one (pkg/kubelet/cm/devicemanager/plugin/v1beta1). A registrar is confined to one
// goroutine. Its methods return true if the session must be replaced.
type registrar struct {
	*server
	*session
	backoff *backoff

	// live counts the open streams, and opened counts all streams that were ever opened.
	live, opened int
	// registering is true while a registration is in progress. openedBefore is the value of opened
	// when it began.
	registering  bool
	openedBefore int
	// awaiting is true if the kubelet has accepted the registration but has not opened its stream yet.
	awaiting bool
	// known is the kubelet's socket as last seen.
	known os.FileInfo

	retry, verify *time.Timer
	// watch triggers the checks of the sockets. It is stopped while a stream is open, because the
	// stream ends when the kubelet does.
	watch      *time.Ticker
	registered chan error
	ignored    chan bool
	children   sync.WaitGroup
}

// run returns when ctx ends or the session must be replaced, after its goroutines have ended.
func (r *registrar) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer r.children.Wait()
	defer cancel()
	r.registered, r.ignored = make(chan error, 1), make(chan bool)
	r.known = statSocket(r.kubeletSocket)
	r.retry, r.verify = time.NewTimer(r.backoff.pause), time.NewTimer(r.Timing.VerifyAfter)
	defer r.retry.Stop()
	defer r.verify.Stop()
	r.watch = time.NewTicker(watchInterval)
	defer r.watch.Stop()
	logged := newRefusalLog(r.Logger)

	for replace := false; !replace; {
		select {
		case <-ctx.Done():
			return
		case event := <-r.events:
			replace = r.streamChanged(event)
		case <-r.retry.C:
			replace = r.register(ctx)
		case err := <-r.registered:
			replace = r.registrationEnded(err)
		case <-r.watch.C:
			replace = r.checkSockets()
		case <-r.verify.C:
			if r.live > 0 {
				r.children.Go(func() {
					select {
					case r.ignored <- r.isIgnored(ctx):
					case <-ctx.Done():
					}
				})
			}
		case ignored := <-r.ignored:
			replace = ignored && r.live > 0
			if replace {
				r.Logger.Warn("kubelet does not show what it was sent, starting over")
				r.backoff.grow()
			}
		case refused := <-r.refusals:
			logged.write(ctx, refused)
		}
	}
}

func (r *registrar) streamChanged(event streamEvent) (replace bool) {
	r.live += int(event)
	r.streams.Store(int64(r.live))
	r.readers.notify()
	if event == streamOpened {
		r.opened++
		r.awaiting = false
		if r.live > 1 {
			// When either stream ends, the kubelet drops the other one.
			r.Logger.Warn("kubelet opened a second stream, starting over")
			r.backoff.grow()
			return true
		}
		r.Logger.Info("kubelet listens")
		r.retry.Stop()
		r.watch.Stop()
		r.verify.Reset(r.Timing.VerifyAfter)
		return false
	}
	r.Logger.Warn("kubelet ended the stream, registering again")
	r.watch.Reset(watchInterval)
	r.retry.Reset(wait.Jitter(firstRetryPause, 1))
	return false
}

// register starts a registration, unless one is in progress or the kubelet has no socket.
func (r *registrar) register(ctx context.Context) (replace bool) {
	switch {
	case r.registering || statSocket(r.kubeletSocket) == nil:
		return false // Retried at the end of the one in progress, or by checkSockets.
	case r.wiped():
		return true
	case r.awaiting:
		r.Logger.Warn("kubelet registered the resource but does not listen, starting over")
		r.backoff.grow()
		return true
	}
	r.registering, r.openedBefore = true, r.opened
	r.children.Go(func() {
		r.awaitBarrier(ctx)
		r.registered <- r.server.register(ctx, r.session)
	})
	return false
}

func (r *registrar) registrationEnded(err error) (replace bool) {
	r.registering = false
	if err != nil {
		r.Logger.Warn("registration failed", "error", err)
		// Use a new socket, because other clients may occupy all connections of this one. With an
		// open stream, only the answer was lost; the next try follows the end of the stream.
		if r.live == 0 || r.wiped() {
			r.backoff.grow()
			return true
		}
		return false
	}
	r.counters.registrations.Add(1)
	switch {
	case r.live > 0:
		r.backoff.reset()
	case r.opened > r.openedBefore: // A stream opened and has already ended.
		r.backoff.grow()
		r.retry.Reset(r.backoff.pause)
	default:
		r.awaiting = true
		r.retry.Reset(r.Timing.StreamTimeout)
	}
	return false
}

// checkSockets detects that the session's socket was wiped, and that a kubelet has started.
func (r *registrar) checkSockets() (replace bool) {
	if r.wiped() {
		// This is checked while registering, too: the kubelet would dial the removed socket for 10 s.
		r.backoff.reset()
		return true
	}
	if now := statSocket(r.kubeletSocket); !r.registering && now != nil && !sameSocket(now, r.known) {
		r.known = now
		r.backoff.reset()
		r.awaiting = false
		r.retry.Reset(0)
	}
	return false
}

// The first calls follow each other quickly: a kubelet that is about to disconnect the old plugin
// does so within milliseconds, and has no device to grant until the new plugin registers. Later
// calls are rarer: the kubelet answers only 100 a second from all clients together.
const (
	firstBarrierPause = 5 * time.Millisecond
	mostBarrierPause  = 50 * time.Millisecond
	barrierTimeout    = 10 * time.Second
)

// awaitBarrier waits until the kubelet shows no Healthy device of the resource. The kubelet finds plugins
// by resource name: if the new plugin registered earlier, the end of the old connection would disconnect
// the new one (runClient and disconnectClient in pkg/kubelet/cm/devicemanager/plugin/v1beta1). If the
// kubelet cannot be read, or still shows devices after barrierTimeout, the registration is tried anyway.
func (s *server) awaitBarrier(ctx context.Context) {
	if s.Kubelet == nil {
		return
	}
	limited, cancel := context.WithTimeout(ctx, barrierTimeout)
	defer cancel()
	retry := wake.Backoff(firstBarrierPause, mostBarrierPause)
	for limited.Err() == nil {
		serving, err := s.Kubelet.Serving(limited, s.name)
		if limited.Err() == nil && (err != nil || !serving) {
			return
		}
		wake.Sleep(limited, retry.Step())
	}
	if ctx.Err() == nil {
		s.Logger.Warn("another plugin seems to serve this resource, registering all the same")
	}
}

// isIgnored reports whether the kubelet shows no Healthy device of the resource although it was sent
// some on its open stream. That happens after another plugin registered the same name and ended.
func (s *server) isIgnored(ctx context.Context) bool {
	current := s.current.Load()
	if s.Kubelet == nil || !slices.ContainsFunc(current.list.Entries, func(e Entry) bool { return e.Healthy }) {
		return false
	}
	serving, err := s.Kubelet.Serving(ctx, s.name)
	return err == nil && !serving && s.current.Load() == current
}

// firstRetryPause is the shortest pause after a failure. Every pause is randomly extended, to at
// most twice its length.
const firstRetryPause = 50 * time.Millisecond

// backoff is the pause before the next try: none at first, and after each failure twice as long, up
// to 5 s with the extension.
type backoff struct {
	pause time.Duration
	retry wait.Backoff
}

func newBackoff() *backoff {
	retry := wake.Backoff(firstRetryPause, 2500*time.Millisecond)
	retry.Jitter = 1
	return &backoff{retry: retry}
}

func (b *backoff) reset() { *b = *newBackoff() }

func (b *backoff) grow() { b.pause = b.retry.Step() }

// session is one listening socket and its gRPC server. A socket's name is used only once, so that a
// kubelet which tells plugins apart by their sockets (kubernetes#135437) never takes a new session
// for an old one.
type session struct {
	path string
	grpc *grpc.Server
	// events tells the session's registrar about streams that open and end.
	events chan streamEvent
	// stopping is closed when the session ends, and ends the streams.
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

// socketName returns a name that is unique for each session. It contains the resource to help people.
func socketName(resource string) string {
	readable := strings.ReplaceAll(resource, "/", "_")
	suffix := fmt.Sprintf("-%08x.sock", rand.Uint32())
	readable = readable[:min(len(readable), maxSocketName-len(socketPrefix)-len(suffix))]
	return socketPrefix + readable + suffix
}

const socketPrefix = "virgate-"

// SocketPattern matches the names of all sockets that Virgate creates.
const SocketPattern = socketPrefix + "*.sock"

func (s *server) open() (*session, error) {
	path := filepath.Join(s.Dir, socketName(s.name))
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", s.name, err)
	}
	return s.serve(path, listener), nil
}

func (s *server) serve(path string, listener net.Listener) *session {
	session := &session{
		path: path,
		grpc: grpc.NewServer(
			grpc.WaitForHandlers(true),
			grpc.MaxConcurrentStreams(maxStreams), grpc.MaxHeaderListSize(maxHeaderBytes),
			grpc.MaxRecvMsgSize(maxRequestBytes),
			grpc.ConnectionTimeout(maxIdle),
			grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: maxIdle}),
		),
		events:   make(chan streamEvent),
		stopping: make(chan struct{}),
		served:   make(chan struct{}),
	}
	api.RegisterDevicePluginServer(session.grpc, service{server: s, session: session})
	go func() {
		defer close(session.served)
		// Serve fails once close has closed the listener.
		_ = session.grpc.Serve(netutil.LimitListener(listener, maxConnections))
	}()
	return session
}

// Only root can connect to a session's socket, so simple limits are enough to keep a faulty client
// from using up the node's memory.
const (
	// maxConnections limits the connections of all clients together. The kubelet needs one; clients
	// beyond the limit wait until another connection ends. A request is held in memory before
	// anything can refuse it, so the memory is bounded only by the product of the three limits:
	// 32 MiB. A limit on calls would apply only after decoding.
	maxConnections = 4
	// maxStreams limits the calls on one connection. The kubelet keeps ListAndWatch open and makes
	// one call beside it.
	maxStreams = 2
	// maxHeaderBytes is far above the few hundred bytes that the kubelet sends.
	maxHeaderBytes = 16 << 10
	// maxRequestBytes is enough for a request that names every device of the longest list
	// (sharing.MaxDevices) as available and again as required.
	maxRequestBytes = 4 << 20
	// maxIdle is how long a connection may stay open without a call, or without starting HTTP/2.
	// Without this limit, idle clients could occupy all connections for ever, and the kubelet could
	// not come back.
	maxIdle = 5 * time.Second
)

// close ends the streams, removes the socket, and returns after every handler has ended. Events
// need no receiver any more.
func (s *session) close() {
	close(s.stopping)
	s.grpc.Stop()
	<-s.served
}

// report hands an event to the registrar. It returns false if the session or stream has ended.
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

// wiped reports whether the session's socket was removed. The kubelet removes all sockets when it starts.
func (s *session) wiped() bool {
	_, err := os.Lstat(s.path)
	return errors.Is(err, os.ErrNotExist)
}

// register asks the kubelet to connect to the session's socket.
func (s *server) register(ctx context.Context, session *session) error {
	ctx, cancel := context.WithTimeout(ctx, s.Timing.RegisterTimeout)
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

// RemoveSockets removes the sockets that a killed Virgate has left in dir. Only the program that
// may serve the directory calls it, before it starts to serve.
func RemoveSockets(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, SocketPattern))
	if err != nil {
		return fmt.Errorf("find sockets: %w", err)
	}
	var errs []error
	for _, path := range left {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}
