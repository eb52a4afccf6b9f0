package podresources

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/sharing"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// ErrUnknown is returned if neither PodResources nor the checkpoint could be read: nothing is known
// of the kubelet.
var ErrUnknown = errors.New("kubelet state unknown")

// ErrIncomplete is returned if only PodResources could be read, so soon after the kubelet's start
// that it may not know all pods yet.
var ErrIncomplete = errors.New("kubelet state incomplete")

var (
	errNoSocket     = errors.New("no socket is configured")
	errNoCheckpoint = errors.New("no directory is configured")
)

// maxMessage is the largest answer accepted, in bytes. 56,000 devices make
// 4.4 MB, more than gRPC's default.
const maxMessage = 16 << 20

// Options are where the kubelet is, and how to read it.
type Options struct {
	// Socket is the path of PodResources' socket; empty for none.
	Socket string
	// CheckpointDir is the device-plugins directory, with the checkpoint and
	// kubelet.sock; empty for none.
	CheckpointDir string
	// Logger logs which source cannot be read; nil disables it.
	Logger *slog.Logger
	// Now is the clock that the age of kubelet.sock is computed with; nil means time.Now.
	Now func() time.Time
	// Claimed returns the UUIDs of the units that a container has from a DRA driver, by a claim;
	// see cdi.Claims. If it is nil, claims are left out.
	Claimed func(driver string, devices, cdiNames []string) (units []string, anyGPU bool)
	// Timeout limits one call to PodResources with its retries; 0 means 2 s.
	Timeout time.Duration
}

// Source reads the kubelet. Its methods may be called from any goroutine.
type Source struct {
	options Options
	logger  *slog.Logger
	// limiter is for background calls, and urgent is for calls that a pod waits for.
	limiter, urgent *rate.Limiter
	// allocatables and holders let callers that wait for their turn share one call.
	allocatables *shared[map[string][]string]
	holders      *shared[[]sharing.Allocation]

	// connection is nil if there is no socket; connectErr says why.
	connection *grpc.ClientConn
	connectErr error

	// claims are the last claims that PodResources had, and unread is why a source could not be
	// read at the last try. Both are guarded by mu.
	mu     sync.Mutex
	claims []seenClaim
	unread unread
}

type unread struct{ podResources, checkpoint error }

// Unread returns why a source could not be read when Held last tried; nil for a source that could
// be read, or was not tried yet. It is no error that a kubelet has no checkpoint yet. Without
// PodResources, pods have a UID and no name, and pods with claims alone are not seen. Without the
// checkpoint, what only finished init containers had is not seen.
func (s *Source) Unread() (podResources, checkpoint error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unread.podResources, s.unread.checkpoint
}

// setUnread records what could not be read, and logs when that begins and ends.
func (s *Source) setUnread(now unread) {
	s.mu.Lock()
	last := s.unread
	s.unread = now
	s.mu.Unlock()
	switch {
	case last.podResources == nil && now.podResources != nil:
		s.logger.Warn("the kubelet's PodResources not reached: pods are known by the checkpoint alone, without names",
			"socket", s.options.Socket, "error", now.podResources)
	case last.podResources != nil && now.podResources == nil:
		s.logger.Info("the kubelet's PodResources answers again")
	}
	switch {
	case last.checkpoint == nil && now.checkpoint != nil:
		s.logger.Warn("the kubelet's checkpoint not read: what only finished init containers had is not known", "error",
			now.checkpoint)
	case last.checkpoint != nil && now.checkpoint == nil:
		s.logger.Info("the kubelet's checkpoint read again")
	}
}

// New returns a source, which the caller must close. Nothing is opened before the first call.
func New(options Options) *Source {
	options.Logger = cmp.Or(options.Logger, slog.New(slog.DiscardHandler))
	options.Timeout = cmp.Or(options.Timeout, 2*time.Second)
	if options.Now == nil {
		options.Now = time.Now
	}
	s := &Source{
		options: options,
		logger:  options.Logger.With("component", "podresources"),
		// The kubelet answers 100 calls a second, in bursts of 10, to all of its clients together.
		// These limits allow at most 60 of them, in bursts of 9.
		limiter:      rate.NewLimiter(20, 5),
		urgent:       rate.NewLimiter(40, 4),
		allocatables: newShared[map[string][]string](),
		holders:      newShared[[]sharing.Allocation](),
		connectErr:   errNoSocket,
	}
	if options.Socket != "" {
		s.connection, s.connectErr = connect(options.Socket, options.Timeout)
	}
	return s
}

// Close closes the connection. Calls in progress and later calls do without PodResources.
func (s *Source) Close() error {
	if s.connection == nil {
		return nil
	}
	if err := s.connection.Close(); status.Code(err) != codes.Canceled { // It was closed before.
		return err
	}
	return nil
}

// connect creates the one connection. gRPC dials it at the first call, and again whenever the
// kubelet restarts.
func connect(socket string, timeout time.Duration) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///pod-resources",
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		// gRPC's default backoff grows to two minutes; a kubelet is away for seconds.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay:  50 * time.Millisecond,
				Multiplier: 1.6,
				Jitter:     0.2,
				MaxDelay:   time.Second,
			},
			MinConnectTimeout: timeout,
		}))
}

// rateLimited is the message of the kubelet's rate limiter (pkg/kubelet/apis/grpc/ratelimit.go). An
// answer that is too large has the same code, ResourceExhausted, but is not worth another try.
const rateLimited = "rejected by rate limit"

// call calls one method, within the timeout and the limiter's rate. If the kubelet's rate limiter
// refuses, it tries again with growing pauses until the timeout, and then returns the kubelet's error.
func call[Response any](
	ctx context.Context,
	s *Source,
	limiter *rate.Limiter,
	method func(context.Context, api.PodResourcesListerClient) (Response, error),
) (none Response, _ error) {
	if s.connection == nil {
		return none, s.connectErr
	}
	client := api.NewPodResourcesListerClient(s.connection)
	ctx, cancel := context.WithTimeout(ctx, s.options.Timeout)
	defer cancel()
	if err := limiter.Wait(ctx); err != nil {
		return none, err
	}
	retry := wake.Backoff(50*time.Millisecond, s.options.Timeout)
	for {
		response, err := method(ctx, client)
		if status.Code(err) != codes.ResourceExhausted || status.Convert(err).Message() != rateLimited {
			return response, err
		}
		wake.Sleep(ctx, retry.Step())
		if limiter.Wait(ctx) != nil {
			return none, err
		}
	}
}

// shared makes one call at a time. It makes none for a caller whose question was answered by
// another caller's call while it waited for its turn: otherwise many resources that register at
// once would each wait for a turn. Unlike golang.org/x/sync/singleflight, it never gives an answer
// that is older than the question.
type shared[Answer any] struct {
	// turn has room for the caller that makes a call, and guards the fields below begun.
	turn chan struct{}
	// begun counts the calls that have begun. answered is the number of the call that answer and
	// err are from.
	begun    atomic.Uint64
	answered uint64
	answer   Answer
	err      error
}

func newShared[Answer any]() *shared[Answer] {
	return &shared[Answer]{turn: make(chan struct{}, 1)}
}

// ask returns the answer of a call that begins after ask was called. call must call begins each
// time it stops waiting and makes its request. The answer is for several callers and must not be
// changed. The error is from call or from ctx.
//
// The call is cancelled when ctx ends, but does not see the deadline of ctx: the rate limiter would
// fail at once on a deadline that is too near, and the other callers would get that error.
func (s *shared[Answer]) ask(
	ctx context.Context,
	call func(ctx context.Context, begins func()) (Answer, error),
) (none Answer, _ error) {
	before := s.begun.Load()
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return none, ctx.Err()
	}
	defer func() { <-s.turn }()
	if s.answered > before {
		return s.answer, s.err
	}
	calling, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	began := uint64(0)
	begins := func() { began = s.begun.Add(1) }
	answer, err := call(calling, begins)
	if ctx.Err() != nil {
		return none, ctx.Err() // A cancelled call's error is not for the other callers.
	}
	if began == 0 {
		begins() // It failed before its request.
	}
	s.answered = began
	s.answer = answer
	s.err = err
	return answer, err
}
