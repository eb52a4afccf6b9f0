package plugin

import (
	"context"
	"sync"
	"time"
)

// streamTimeout is how long after a registration the kubelet may take to open
// its stream.
const streamTimeout = 5 * time.Second

// registrar keeps one session registered: one stream at a time, and never a
// registration while a stream is live (kubelet.md F5, F8). It is the state of
// one goroutine. Its methods return true when the session must be replaced.
type registrar struct {
	*server
	*session
	backoff *backoff

	// live is the number of streams open, opened of those opened so far.
	live, opened int
	// registering says that a registration is under way, which began when
	// openedBefore streams had been opened.
	registering  bool
	openedBefore int
	// awaiting says that the kubelet has registered the session and has not
	// opened a stream yet.
	awaiting bool
	// known is the kubelet's socket as last seen.
	known identity

	retry, verify *time.Timer
	// watch is when to look at the sockets. It rests while a stream is open: who
	// has one notices a kubelet that goes by that.
	watch      *time.Ticker
	registered chan error
	ignored    chan bool
	children   sync.WaitGroup
}

// attend returns when ctx ends or the session must be replaced, and its
// goroutines have ended.
func (r *registrar) attend(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer r.children.Wait()
	defer cancel()
	r.registered, r.ignored = make(chan error, 1), make(chan bool)
	r.known = identify(r.kubeletSocket)
	r.retry, r.verify = time.NewTimer(r.backoff.wait()), time.NewTimer(r.timing.VerifyAfter)
	defer r.retry.Stop()
	defer r.verify.Stop()
	r.watch = time.NewTicker(watchInterval)
	defer r.watch.Stop()
	logged := newRefusalLog(r.log)

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
			replace = r.lookAtSockets()
		case <-r.verify.C:
			if r.live > 0 {
				r.children.Go(func() { r.check(ctx) })
			}
		case ignored := <-r.ignored:
			replace = ignored && r.live > 0
			if replace {
				r.log.Warn("kubelet does not show what it was sent, starting over")
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
	r.changed.give()
	if event == streamOpened {
		r.opened++
		r.awaiting = false
		r.counters.streams.Add(1)
		if r.live > 1 {
			// When either ends, the kubelet drops the other.
			r.log.Warn("kubelet opened a second stream, starting over")
			r.backoff.grow()
			return true
		}
		r.log.Info("kubelet listens")
		r.retry.Stop()
		r.watch.Stop()
		r.verify.Reset(r.timing.VerifyAfter)
		return false
	}
	r.log.Warn("kubelet ended the stream, registering again")
	r.watch.Reset(watchInterval)
	r.retry.Reset(jitter(minBackoff))
	return false
}

// register begins a registration, unless there is nobody to register with.
func (r *registrar) register(ctx context.Context) (replace bool) {
	switch {
	case r.registering || !identify(r.kubeletSocket).exists():
		return false // The end of what is under way, or a look, tries again.
	case r.wiped():
		return true
	case r.awaiting:
		r.log.Warn("kubelet registered the resource but does not listen, starting over")
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

// check hands on whether the kubelet ignores the stream.
func (r *registrar) check(ctx context.Context) {
	ignored := r.isIgnored(ctx)
	select {
	case r.ignored <- ignored:
	case <-ctx.Done():
	}
}

func (r *registrar) registrationEnded(err error) (replace bool) {
	r.registering = false
	if err != nil {
		r.log.Warn("registration failed", "error", err)
		if r.wiped() {
			r.backoff.grow()
			return true
		}
		if r.live == 0 { // Else only the answer was lost, and the stream's end tries again.
			r.retry.Reset(r.backoff.next())
		}
		return false
	}
	r.counters.registrations.Add(1)
	switch {
	case r.live > 0:
		r.backoff.reset()
	case r.opened > r.openedBefore: // Its stream has come and gone.
		r.retry.Reset(r.backoff.next())
	default:
		r.awaiting = true
		r.retry.Reset(streamTimeout)
	}
	return false
}

// lookAtSockets notices a wiped socket and a kubelet that has started.
func (r *registrar) lookAtSockets() (replace bool) {
	if r.wiped() {
		// Also while registering: the kubelet would dial a wiped socket for 10 s.
		r.backoff.reset()
		return true
	}
	if now := identify(r.kubeletSocket); !r.registering && now.exists() && !now.same(r.known) {
		r.known = now
		r.backoff.reset()
		r.awaiting = false
		r.retry.Reset(0)
	}
	return false
}
