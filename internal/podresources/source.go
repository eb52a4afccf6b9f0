package podresources

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// ErrUnknown says that neither PodResources nor the checkpoint could be read:
// nothing is known of the kubelet.
var ErrUnknown = errors.New("kubelet state unknown")

// ErrIncomplete says that only PodResources could be read, and so soon after
// the kubelet's start that it may not know of all pods yet.
var ErrIncomplete = errors.New("kubelet state incomplete")

var (
	errNoSocket     = errors.New("no socket is configured")
	errNoCheckpoint = errors.New("no directory is configured")
	errClosed       = errors.New("source is closed")
)

// maxMessage is the largest answer accepted, in bytes. 56,000 devices make
// 4.4 MB, more than gRPC's default.
const maxMessage = 16 << 20

// Options say where the kubelet is.
type Options struct {
	// Socket is the path of PodResources' socket; empty for none.
	Socket string
	// CheckpointDir is the device-plugins directory, with the checkpoint and
	// kubelet.sock; empty for none.
	CheckpointDir string
	// Logger gets what went wrong with one source while the other answered;
	// nil for nothing.
	Logger *slog.Logger
	// Now is the clock that kubelet.sock's age is told by; nil means time.Now.
	Now func() time.Time
	// Timeout limits one call to PodResources with its retries; 0 means 2 s.
	Timeout time.Duration
}

// Source is the kubelet as far as it can be read. Its methods may be called
// from any goroutine.
type Source struct {
	options Options
	logger  *slog.Logger
	limiter *rate.Limiter
	// allocatables makes one call of those that wait for their turn.
	allocatables *shared[map[string][]string]

	mu sync.Mutex
	// connection is nil before the first call.
	connection *grpc.ClientConn
	closed     bool
}

// New returns a source. Nothing is opened before the first call.
func New(options Options) *Source {
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	if options.Now == nil {
		options.Now = time.Now
	}
	if options.Timeout == 0 {
		options.Timeout = 2 * time.Second
	}
	return &Source{
		options: options,
		logger:  options.Logger.With("component", "podresources"),
		// The kubelet serves 100 calls a second to all of its clients together.
		// This takes at most twenty-five of any second's.
		limiter:      rate.NewLimiter(20, 5),
		allocatables: newShared[map[string][]string](),
	}
}

// Close closes the connection. Calls under way and later ones do without
// PodResources.
func (s *Source) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.connection == nil {
		return nil
	}
	connection := s.connection
	s.connection = nil
	return connection.Close()
}

// client returns a client on the one connection, which gRPC dials again as
// often as the kubelet restarts.
func (s *Source) client() (api.PodResourcesListerClient, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.options.Socket == "":
		return nil, errNoSocket
	case s.closed:
		return nil, errClosed
	}
	if s.connection == nil {
		connection, err := grpc.NewClient("passthrough:///pod-resources",
			grpc.WithAuthority("localhost"),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", s.options.Socket)
			}),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
			// The default back-off grows to two minutes; a kubelet is away for
			// seconds.
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
				MinConnectTimeout: s.options.Timeout,
			}))
		if err != nil {
			return nil, err
		}
		s.connection = connection
	}
	return api.NewPodResourcesListerClient(s.connection), nil
}
