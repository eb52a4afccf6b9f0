package plugin

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// service answers the kubelet's calls for one session. No method but
// ListAndWatch blocks, takes a lock or does I/O: the kubelet makes these calls
// without a deadline and the node's pod handling waits for them.
type service struct {
	api.UnimplementedDevicePluginServer
	*server
	*session
}

// GetDevicePluginOptions is called inside Register and by nobody else.
func (s service) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch sends the current list and every later one, but no more than
// one in Timing.ListInterval: what changes meanwhile goes into the next.
func (s service) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	ctx := stream.Context()
	if !s.report(ctx, streamOpened) {
		return status.Error(codes.Unavailable, "the plugin stops")
	}
	defer s.report(context.Background(), streamEnded)
	defer keep(ctx)()
	last := &delivery{&generation{}, stream}
	s.sent.Store(last)
	defer func() { s.sent.CompareAndSwap(last, nil) }()

	for {
		current := s.current.Load()
		if err := stream.Send(current.response); err != nil {
			return err
		}
		s.counters.lists.Add(1)
		next := &delivery{current, stream}
		if s.sent.CompareAndSwap(last, next) { // It does not when a newer stream is open.
			last = next
		}
		s.changed.give()
		pause, cancel := context.WithTimeout(ctx, s.timing.ListInterval)
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

// await returns nil when done is closed, and an error when the stream or the
// session ends first.
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

// GetPreferredAllocation chooses among the devices that the kubelet has free.
// It never fails a pod: a choice that cannot be made is left to the kubelet.
func (s service) GetPreferredAllocation(_ context.Context, request *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	s.inFlight.Add(1)
	defer s.inFlight.Add(-1)
	current, began := s.current.Load(), s.now()
	at := began.UnixNano()
	response := &api.PreferredAllocationResponse{}
	for _, r := range request.ContainerRequests {
		ids := current.index.Prefer(r.AvailableDeviceIDs, r.MustIncludeDeviceIDs, int(r.AllocationSize))
		for _, id := range ids {
			if d, ok := current.devices[id]; ok {
				d.use.named.Store(at)
			}
		}
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	s.counters.preferred.observe(s.now().Sub(began))
	return response, nil
}

// Allocate grants devices, one answer a container. All of them are granted or
// none.
func (s service) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	s.inFlight.Add(1)
	defer s.inFlight.Add(-1)
	current, at := s.current.Load(), s.now()
	sameUnit := uint64(0)
	response := &api.AllocateResponse{}
	for _, r := range request.ContainerRequests {
		err := s.closing.refuse(s.name, r.DevicesIds)
		var granted *api.ContainerAllocateResponse
		var twice bool
		if err == nil {
			granted, twice, err = current.grant(r.DevicesIds, at)
		}
		if err == nil {
			// Again, now that the devices count as held: whoever closes a unit and
			// then looks for holders either sees this grant or has it refused.
			err = s.closing.refuse(s.name, r.DevicesIds)
		}
		if err != nil {
			s.refuse(r.DevicesIds, err, at)
			return nil, err
		}
		if twice {
			sameUnit++
		}
		response.ContainerResponses = append(response.ContainerResponses, granted)
	}
	if len(response.ContainerResponses) == 0 {
		err := refusef(Internal, codes.InvalidArgument, "%s: no container in the request", s.name)
		s.refuse(nil, err, at)
		return nil, err
	}
	s.counters.granted.Add(1)
	s.counters.sameUnit.Add(sameUnit)
	s.counters.allocated.observe(s.now().Sub(at))
	return response, nil
}

// refuse counts a refusal and leaves the log line to the server's own
// goroutine: a log that blocks must not block the kubelet.
func (s service) refuse(ids []string, err error, began time.Time) {
	s.counters.refused[reasonOf(err).index()].Add(1)
	s.counters.failed.observe(s.now().Sub(began))
	select {
	case s.refusals <- refusal{ids, err}:
	default:
	}
}
