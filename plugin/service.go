package plugin

import (
	"context"

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

	for {
		current := s.current.Load()
		if err := stream.Send(current.response); err != nil {
			return err
		}
		s.counters.lists.Add(1)
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
	current, at := s.current.Load(), s.now().UnixNano()
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
	return response, nil
}

// Allocate grants devices, one answer a container. All of them are granted or
// none.
func (s service) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	s.inFlight.Add(1)
	defer s.inFlight.Add(-1)
	current, at := s.current.Load(), s.now()
	response := &api.AllocateResponse{}
	for _, r := range request.ContainerRequests {
		granted, err := current.grant(r.DevicesIds, at)
		if err != nil {
			s.refuse(r.DevicesIds, err)
			return nil, err
		}
		response.ContainerResponses = append(response.ContainerResponses, granted)
	}
	if len(response.ContainerResponses) == 0 {
		err := status.Errorf(codes.InvalidArgument, "%s: no container in the request", s.name)
		s.refuse(nil, err)
		return nil, err
	}
	s.counters.granted.Add(1)
	return response, nil
}

// refuse counts a refusal and leaves the log line to the server's own
// goroutine: a log that blocks must not block the kubelet.
func (s service) refuse(ids []string, err error) {
	s.counters.refused.Add(1)
	select {
	case s.refusals <- refusal{ids, err}:
	default:
	}
}
