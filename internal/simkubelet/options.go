package simkubelet

import (
	"log/slog"
	"math/rand/v2"
	"time"
)

// Options say where a kubelet lives and how it differs from the usual one.
type Options struct {
	// Dir is the device-plugins directory. It gets kubelet.sock and the
	// checkpoint file; every other socket directly in it is removed at each
	// start. It is created when missing. Keep it short: a unix socket's path
	// has 107 bytes at most.
	Dir string
	// PodResourcesSocket is where PodResources is served; empty for nowhere.
	PodResourcesSocket string
	// Logger gets what the kubelet would log; nil for nothing.
	Logger *slog.Logger
	// Violation is called, outside every lock, for each breach of the contract
	// and each panic the real kubelet would have had. Violations collects them
	// whether or not it is set.
	Violation func(message string)
	// Witness is told of every Event, in the order in which they happen. It is
	// called under the kubelet's lock: it must neither block nor call the kubelet.
	Witness func(event Event)
	// AllowOverlap accepts several live streams for one resource without
	// calling it a violation. The kubelet then still behaves as the real one:
	// the first stream to end takes the newest client with it.
	AllowOverlap bool
	// NUMAAligned is the topology manager's best-effort policy at container
	// scope; without it the policy is none.
	NUMAAligned bool
	// HoldPods leaves the pods of an earlier process out after a start until
	// RestorePods is called, as between a kubelet's start and the API server's
	// first answer: PodResources does not show them, and nothing is purged.
	HoldPods bool
	// DialTimeout limits the dial back to a registering plugin; 0 means the
	// kubelet's 10 s.
	DialTimeout time.Duration
	// StatusPeriod is the time between two node statuses; 0 means the
	// kubelet's 10 s.
	StatusPeriod time.Duration
	// StopGrace is how long a stopped endpoint is kept; 0 means the kubelet's
	// 5 min. The first node status after it removes the resource.
	StopGrace time.Duration
	// Random shuffles every order that the kubelet leaves to chance. With nil
	// the order is sorted, so that tests repeat. It is used under a lock.
	Random *rand.Rand
	// Now is the clock of StopGrace; nil means time.Now.
	Now func() time.Time
}

func (o Options) withDefaults() Options {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.DialTimeout == 0 {
		o.DialTimeout = 10 * time.Second
	}
	if o.StatusPeriod == 0 {
		o.StatusPeriod = 10 * time.Second
	}
	if o.StopGrace == 0 {
		o.StopGrace = 5 * time.Minute
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return o
}
