package policy

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const (
	// firstPause is the wait after a first failure. It doubles up to lastPause. A
	// wait is between half and one and a half of that, so that the nodes of a
	// cluster do not come back together.
	firstPause, lastPause = 500 * time.Millisecond, 30 * time.Second
	// cutSpread is the time over which the nodes of a cluster come back when
	// their watches are cut at once, as when an API server ends: each waits for
	// a part of it by chance. 10,000 nodes are then 2,000 connections a second.
	cutSpread = 5 * time.Second
)

// errCut says that a watch was open and ended before its time, which many nodes
// may see at once.
var errCut = errors.New("the watch was cut")

// pace is how long a feed waits between its attempts. It is one goroutine's.
type pace struct {
	first, spread time.Duration
	// pause is the wait after the next failure, before chance.
	pause time.Duration
	// chance is at least 0 and less than 1.
	chance func() float64
}

func newPace(first, spread time.Duration) *pace {
	first = cmp.Or(first, firstPause)
	return &pace{first: first, spread: cmp.Or(spread, cutSpread), pause: first, chance: rand.Float64}
}

// after returns the wait after an attempt that lasted so long and ended with
// err, nil when the watch ended in its time. It is never shorter than the API
// server asks for (Retry-After), and never the same on all nodes. A server that
// says that it has forgotten a version is there again, and is asked soon.
func (p *pace) after(lasted time.Duration, err error) time.Duration {
	if lasted > lastPause || isExpired(err) {
		p.pause = p.first
	}
	wait := p.part(p.pause) + p.pause/2
	p.pause = min(2*p.pause, lastPause)
	if (errors.Is(err, errCut) || errors.Is(err, errGarbled)) && !isExpired(err) {
		wait += p.part(p.spread)
	}
	if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
		// All that are refused are told the same, up to 32 s (k8s.io/apiserver
		// v0.36, dropped_requests_tracker.go).
		asked := time.Duration(seconds) * time.Second
		wait += asked + p.part(asked)
	}
	return wait
}

// isExpired says that the API server has forgotten the version from which to
// watch.
func isExpired(err error) bool { return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) }

func (p *pace) part(of time.Duration) time.Duration { return time.Duration(p.chance() * float64(of)) }
