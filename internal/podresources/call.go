package podresources

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// rateLimited is the message by which the kubelet's limiter is told from an
// answer that is too large; both are ResourceExhausted
// (pkg/kubelet/apis/grpc/ratelimit.go).
const rateLimited = "rejected by rate limit"

// call calls one method within the timeout and the limit. A call that the
// kubelet's limiter turned away is made again, later each time, until the
// timeout; then its error is the kubelet's.
func call[Response any](ctx context.Context, s *Source, method func(context.Context, api.PodResourcesListerClient) (Response, error)) (Response, error) {
	var none Response
	client, err := s.client()
	if err != nil {
		return none, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.options.Timeout)
	defer cancel()
	if err := s.limiter.Wait(ctx); err != nil {
		return none, err
	}
	for pause := 50 * time.Millisecond; ; pause *= 2 {
		response, err := method(ctx, client)
		if status.Code(err) != codes.ResourceExhausted || status.Convert(err).Message() != rateLimited {
			return response, err
		}
		if !sleep(ctx, pause) || s.limiter.Wait(ctx) != nil {
			return none, err
		}
	}
}

// sleep is false when ctx ends first.
func sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
