package policy

import (
	"context"
	"sync/atomic"
)

// Ahead watches before anybody listens: what a profile says about the process
// must be known when the rest of the program is made.
type Ahead struct {
	listener atomic.Pointer[func()]
	moved    chan struct{}
	cancel   context.CancelFunc
	ended    chan error
}

// WatchAhead starts watch. Stop must be called.
func WatchAhead(ctx context.Context, watch func(ctx context.Context, changed func()) error) *Ahead {
	ctx, cancel := context.WithCancel(ctx)
	a := &Ahead{moved: make(chan struct{}, 1), cancel: cancel, ended: make(chan error, 1)}
	go func() { a.ended <- watch(ctx, a.changed) }()
	return a
}

func (a *Ahead) changed() {
	if listener := a.listener.Load(); listener != nil {
		(*listener)()
	}
	select {
	case a.moved <- struct{}{}:
	default:
	}
}

// Await returns when enough says so, which is asked at every change, or when
// ctx ends. It is for before Watch.
func (a *Ahead) Await(ctx context.Context, enough func() bool) {
	for !enough() {
		select {
		case <-ctx.Done():
			return
		case <-a.moved:
		}
	}
}

// Watch has changed called at once and for all that changes until ctx ends.
func (a *Ahead) Watch(ctx context.Context, changed func()) error {
	a.listener.Store(&changed)
	changed()
	<-ctx.Done()
	return nil
}

// Stop ends the watching and returns when it has ended.
func (a *Ahead) Stop() error {
	a.cancel()
	return <-a.ended
}
