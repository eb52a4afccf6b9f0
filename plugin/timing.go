package plugin

import (
	"cmp"
	"time"
)

// Timing are the waits of the protocol. The zero value of a field means its
// default.
type Timing struct {
	// Quiet is how long an Unhealthy surplus device stays in the list after the
	// kubelet has applied that; default 30 s. It outlasts any admission that
	// chose the device before.
	Quiet time.Duration
	// RetireAfter is how long a surplus device that a pod holds stays Healthy;
	// default 10 min.
	RetireAfter time.Duration
	// StopAfter is how long a dropped resource is served with an empty list
	// before its server stops; default 30 s, so that the kubelet publishes the
	// zero at least twice.
	StopAfter time.Duration
	// VerifyAfter is how long after a stream has opened the kubelet must show
	// the resource; default 5 s.
	VerifyAfter time.Duration
	// ListInterval is the least time between two lists of a resource; default
	// 100 ms. Each list costs the kubelet an fsync.
	ListInterval time.Duration
}

func (t Timing) withDefaults() Timing {
	t.Quiet = cmp.Or(t.Quiet, 30*time.Second)
	t.RetireAfter = cmp.Or(t.RetireAfter, 10*time.Minute)
	t.StopAfter = cmp.Or(t.StopAfter, 30*time.Second)
	t.VerifyAfter = cmp.Or(t.VerifyAfter, 5*time.Second)
	t.ListInterval = cmp.Or(t.ListInterval, 100*time.Millisecond)
	return t
}

// pollInterval is how often the kubelet is asked while something waits for it.
func (t Timing) pollInterval() time.Duration {
	return min(max(t.Quiet/4, 20*time.Millisecond), time.Second)
}
