package plugin

import (
	"cmp"
	"context"
	"errors"
	"os"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/internal/wake"
)

// server keeps one resource registered and serves its current generation.
type server struct {
	// Options are the Manager's options, with a Logger that names the resource.
	Options
	name, kubeletSocket string

	current atomic.Pointer[generation]
	// sent is the generation last sent on the open stream; nil without a stream.
	sent atomic.Pointer[sentList]
	// applied is the version of the newest list that the kubelet was seen to have; 0 if it is not
	// known to have a list of the open stream.
	applied  atomic.Int64
	inFlight atomic.Int64
	streams  atomic.Int64
	counters counters
	// observers measure how long calls take.
	observers CallObservers
	// waiting is the next generation while it waits for its announcement; nil if none waits.
	waiting atomic.Pointer[waitingList]
	// known is the announcement state of the newest list that the kubelet has; nil before the first.
	known atomic.Pointer[listOutcome]
	// refusals are to be logged. If the channel is full, they are only counted.
	refusals chan refusal
	// readers are notified when Manager.Status changes. listed and grants wake Manager.Run after a
	// list was sent on a stream, and after Allocate has granted devices.
	readers        *subscribers
	listed, grants wake.Signal
	refusedUnits   *refusedUnits
}

type counters struct {
	registrations, lists, granted, sameUnit atomic.Uint64
	// refused is indexed by RefusalReason.index.
	refused [len(refusalReasons)]atomic.Uint64
}

// publish makes next the current generation. Only the manager calls it.
func (s *server) publish(next *generation) {
	previous := s.current.Swap(next)
	for i, e := range next.list.Entries {
		if e.RefusesAllocate {
			next.uses[i].refused.CompareAndSwap(0, s.Now().UnixNano())
		}
		if e.Whole {
			next.uses[i].shared.CompareAndSwap(0, s.Now().UnixNano())
		}
	}
	if previous != nil && previous.superseded != next.superseded {
		close(previous.superseded)
	}
}

// watchInterval is how often the sockets are checked. Unlike inotify, this needs no kernel resource
// and works with a directory that is removed and created again.
const watchInterval = 200 * time.Millisecond

// run serves until ctx ends. It opens a session, and replaces it when its socket is removed or when
// the kubelet and Virgate disagree about which streams are open.
func (s *server) run(ctx context.Context) {
	backoff := newBackoff()
	for ctx.Err() == nil {
		session, err := s.open()
		if err != nil {
			if !errors.Is(err, os.ErrNotExist) {
				s.Logger.Warn("no socket", "error", err)
			}
			wake.Sleep(ctx, watchInterval)
			continue
		}
		(&registrar{
			server:  s,
			session: session,
			backoff: backoff,
		}).run(ctx)
		session.close()
		s.streams.Store(0)
		s.readers.notify()
	}
}

// statSocket returns nil if there is no file at path.
func statSocket(path string) os.FileInfo {
	info, _ := os.Stat(path)
	return info
}

// sameSocket reports whether a and b are the same socket file, and not one that replaced the other.
func sameSocket(a, b os.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime())
}

// service answers the kubelet's calls for one session. Except for ListAndWatch, no method blocks,
// takes a lock or does I/O: the kubelet makes these calls without a deadline, and pod admission on
// the whole node waits for them.
type service struct {
	api.UnimplementedDevicePluginServer
	*server
	*session
}

// GetDevicePluginOptions is called by the kubelet while it handles Register.
func (s service) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch sends the current list and every later one, but at most one per Timing.ListInterval;
// changes within the interval are sent together.
func (s service) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	ctx := stream.Context()
	if !s.report(ctx, streamOpened) {
		return status.Error(codes.Unavailable, "the plugin stops")
	}
	defer s.report(context.Background(), streamEnded)
	last := &sentList{&generation{}, stream}
	s.sent.Store(last)
	defer func() { s.sent.CompareAndSwap(last, nil) }()

	for {
		current := s.current.Load()
		if err := stream.Send(current.response()); err != nil {
			return err
		}
		s.counters.lists.Add(1)
		next := &sentList{current, stream}
		if s.sent.CompareAndSwap(last, next) { // Not when a newer stream is open.
			last = next
		}
		s.listed.Notify()
		s.readers.notify()
		pause, cancel := context.WithTimeout(ctx, s.Timing.ListInterval)
		err := s.await(ctx, pause.Done())
		cancel()
		if err != nil {
			return err
		}
		if err := s.await(ctx, current.superseded); err != nil {
			return err
		}
	}
}

// await returns nil once done is closed, or an error if the stream or the session ends first.
func (s service) await(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	case <-s.stopping:
		return status.Error(codes.Unavailable, "the plugin stops")
	}
}

// GetPreferredAllocation chooses among the devices that the kubelet has free. It never fails a pod:
// if it cannot choose, the kubelet does.
func (s service) GetPreferredAllocation(
	_ context.Context,
	request *api.PreferredAllocationRequest,
) (*api.PreferredAllocationResponse, error) {
	s.inFlight.Add(1)
	defer s.inFlight.Add(-1)
	current, began := s.current.Load(), s.Now()
	at := began.UnixNano()
	response := &api.PreferredAllocationResponse{}
	for _, r := range request.ContainerRequests {
		ids := current.choices.Prefer(r.AvailableDeviceIDs, r.MustIncludeDeviceIDs, int(r.AllocationSize))
		for _, id := range ids {
			if i, ok := current.choices.Index(id); ok {
				current.uses[i].preferred.Store(at)
			}
		}
		response.ContainerResponses = append(response.ContainerResponses,
			&api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	observe(s.observers.Preferred, s.Now().Sub(began))
	return response, nil
}

// Allocate grants all of the devices or none, with one answer for each container.
func (s service) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	s.inFlight.Add(1)
	defer s.inFlight.Add(-1)
	at := s.Now() // Taken first, so that a grant from an older generation has a time before the change.
	current := s.current.Load()
	sameUnit := uint64(0)
	response := &api.AllocateResponse{}
	for _, r := range request.ContainerRequests {
		granted, twice, err := s.grant(current, r.DevicesIds, at)
		if err != nil {
			s.recordRefusal(r.DevicesIds, err, at)
			return nil, err
		}
		if twice {
			sameUnit++
		}
		response.ContainerResponses = append(response.ContainerResponses, granted)
	}
	if len(response.ContainerResponses) == 0 {
		err := refusef(Internal, codes.InvalidArgument, "%s: no container in the request", s.name)
		s.recordRefusal(nil, err, at)
		return nil, err
	}
	s.counters.granted.Add(1)
	s.counters.sameUnit.Add(sameUnit)
	s.grants.Notify()
	observe(s.observers.Granted, s.Now().Sub(at))
	return response, nil
}

func (s service) grant(
	current *generation,
	ids []string,
	at time.Time,
) (granted *api.ContainerAllocateResponse, sameUnit bool, err error) {
	err = s.refusedUnits.check(s.name, ids)
	if err != nil {
		return nil, false, err
	}
	granted, sameUnit, err = current.grant(ids, at)
	if err != nil {
		return nil, false, err
	}
	// Check again now that the devices count as held. When a device is closed or its unit blocked, and
	// the holders are read after that, either the reading sees this grant or this check refuses it.
	err = cmp.Or(s.refusedUnits.check(s.name, ids), s.current.Load().refuseClosed(ids))
	if err != nil {
		current.takeBack(ids, at)
	}
	return granted, sameUnit, err
}

// recordRefusal counts a refusal, and leaves the log line to the server's own goroutine, so that a blocked
// log does not block the kubelet.
func (s service) recordRefusal(ids []string, err error, began time.Time) {
	s.counters.refused[reasonOf(err).index()].Add(1)
	observe(s.observers.Refused, s.Now().Sub(began))
	select {
	case s.refusals <- newRefusal(ids, err):
	default:
	}
}
