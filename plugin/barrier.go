package plugin

import (
	"context"
	"slices"
	"time"
)

// The barrier's pace. A kubelet that was about to let go does so within
// milliseconds, in which it has no device to grant; one that does not may take
// long, and answers at most 100 questions a second, all askers together.
const (
	firstBarrierPause = 5 * time.Millisecond
	mostBarrierPause  = 50 * time.Millisecond
	barrierTimeout    = 10 * time.Second
)

// awaitBarrier waits until the kubelet shows no device of the resource. If it
// registered earlier, the end of the old connection would take the new one
// down (kubelet.md F5, F6). Where the kubelet does not say, and when it does
// not let go for barrierTimeout, the registration is tried all the same.
func (s *server) awaitBarrier(ctx context.Context) {
	if s.kubelet == nil {
		return
	}
	limited, cancel := context.WithTimeout(ctx, barrierTimeout)
	defer cancel()
	for pause := firstBarrierPause; limited.Err() == nil; pause = min(2*pause, mostBarrierPause) {
		serving, err := s.kubelet.Serving(limited, s.name)
		if limited.Err() == nil && (err != nil || !serving) {
			return
		}
		sleep(limited, pause)
	}
	if ctx.Err() == nil {
		s.log.Warn("another plugin seems to serve this resource, registering all the same")
	}
}

// isIgnored says that the kubelet has a stream open and still shows no device of
// a resource that has had healthy ones for a while (kubelet.md F6, F8).
func (s *server) isIgnored(ctx context.Context) bool {
	current := s.current.Load()
	if s.kubelet == nil || !slices.ContainsFunc(current.list.Entries, func(e Entry) bool { return e.Healthy }) {
		return false
	}
	serving, err := s.kubelet.Serving(ctx, s.name)
	return err == nil && !serving && s.current.Load() == current
}
