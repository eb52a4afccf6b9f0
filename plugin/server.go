package plugin

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync/atomic"
	"time"
)

// server keeps one resource registered with the kubelet and serves its current
// generation.
type server struct {
	name          string
	dir           string
	kubeletSocket string
	kubelet       Kubelet
	timing        Timing
	log           *slog.Logger
	now           func() time.Time

	current atomic.Pointer[generation]
	// sent is the generation that the open stream was last given; nil when none
	// is open.
	sent     atomic.Pointer[delivery]
	inFlight atomic.Int64
	streams  atomic.Int64
	counters counters
	// refusals wait for the log; when it is full, the count must do.
	refusals chan refusal
	// changed is Manager.Changed.
	changed signal
	closing *closing
}

type counters struct {
	registrations, streams, lists, granted, sameUnit atomic.Uint64
	// refused are by Reason.index.
	refused [reasons]atomic.Uint64
	// allocated, failed and preferred are how long calls took: Allocate by what
	// became of it, and GetPreferredAllocation.
	allocated, failed, preferred latency
}

// publish makes next the current generation. Only the manager calls it.
func (s *server) publish(next *generation) {
	previous := s.current.Swap(next)
	if previous != nil && previous.superseded != next.superseded {
		close(previous.superseded)
	}
}

// watchInterval is how often the sockets are looked at. Looking needs no inotify
// instance and works on a directory that comes, goes and comes back.
const watchInterval = 200 * time.Millisecond

// run serves until ctx ends: it opens a session, and another when the socket
// was wiped or the kubelet is confused about the streams.
func (s *server) run(ctx context.Context) {
	backoff := backoff{}
	for ctx.Err() == nil {
		session, err := s.open()
		if err != nil {
			if !errors.Is(err, os.ErrNotExist) {
				s.log.Warn("no socket", "error", err)
			}
			sleep(ctx, watchInterval)
			continue
		}
		(&registrar{server: s, session: session, backoff: &backoff}).attend(ctx)
		session.close()
		s.streams.Store(0)
		s.changed.give()
	}
}

// identity tells one socket file from its successor.
type identity struct{ info os.FileInfo }

func identify(path string) identity {
	info, err := os.Stat(path)
	if err != nil {
		return identity{}
	}
	return identity{info}
}

func (i identity) exists() bool { return i.info != nil }

func (i identity) same(other identity) bool {
	return i.info != nil && other.info != nil && os.SameFile(i.info, other.info) && i.info.ModTime().Equal(other.info.ModTime())
}
