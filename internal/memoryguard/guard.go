// Package memoryguard detects containers that use more of a GPU's memory than the profile allows,
// and evicts their pods if both the profile and the operator want that. Its caller takes the
// samples.
package memoryguard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/sharing"
)

// Pods gives the guard access to pods.
type Pods struct {
	// UID returns the pod's UID; empty if it is not certain. It is nil if pods are not watched.
	UID func(namespace, pod string) string
	// Evict evicts the pod if it has the UID, within seconds. It returns
	// nodereport.ErrDisruptionBudget, ErrMayNotEvict, ErrPodGone or another error. It is nil if
	// evictions are not allowed.
	Evict func(ctx context.Context, namespace, pod, uid string) error
}

const (
	// evictionWait is how long an evicted pod may take to end before another one is evicted.
	// evictionPause is the time before a refused eviction is requested again.
	evictionWait  = 10 * time.Minute
	evictionPause = 10 * time.Second
	// longestGap is the longest time between two samples over which a container counts as watched,
	// unless three intervals are longer.
	longestGap = 15 * time.Second
)

// Options are the guard's dependencies.
type Options struct {
	Pods   Pods
	Logger *slog.Logger
	// WarningsChanged and LimitsChanged are called when the results of Warnings and OverLimits may
	// have changed. They must not wait.
	WarningsChanged, LimitsChanged func()
}

// Guard detects containers that use more memory than the profile allows.
type Guard struct {
	Options
	// wake holds one signal for Run that there is a new sample. used is true once a profile of this
	// run has had a guard; only Look uses it.
	wake wake.Signal
	used bool

	mu sync.Mutex
	// over are the containers over their limits.
	over map[guarded]*overLimit
	// evicted are the pods that are being evicted, by UID, with the time of the request.
	evicted map[string]time.Time
	// held are the UIDs of pods with containers in the last sample.
	held map[string]bool
	// evictions counts the requests by result.
	evictions map[string]int
	// warning says why the guards of the profile cannot work; empty if they can.
	warning string
}

// guarded is a container on a unit. The pod's UID tells it apart from one of an earlier pod with
// the same name.
type guarded struct {
	sharing.Container
	unit, uid string
}

// overLimit describes a container while it is over its limit.
type overLimit struct {
	since, last time.Time
	use         sharing.ContainerUtilization
	report      nodereport.OverLimit
	// next is when its eviction may be requested.
	next time.Time
}

// New returns a guard without any container yet.
func New(options Options) *Guard {
	return &Guard{
		Options: options,
		wake:    wake.NewSignal(),
		evicted: map[string]time.Time{},
		evictions: map[string]int{
			"evicted": 0,
			"refused": 0,
			"failed":  0,
		},
	}
}

// Unwatched is the warning about a profile with memory guards on a node that cannot watch memory.
const Unwatched = "memory: the memory of containers is not watched: that requires --watch-pods and the host's PIDs, " +
	"which are the chart's metrics.perContainer"

// Sample is the memory use at one moment, with what the guard needs to judge it.
type Sample struct {
	Report sharing.UtilizationReport
	GPUs   []sharing.GPU
	// Planned is what the profile wants, Listed what the kubelet was sent, Held which containers
	// hold what.
	Planned, Listed []sharing.Resource
	Held            []sharing.Allocation
	// At is when the sample was taken, Interval the time between two samples.
	At       time.Time
	Interval time.Duration
}

// Look adds the limits to the report's containers, and records how long each has been over its
// limit. Where something is not certain in this sample, it counts as uncertain since the previous
// one, so the time starts anew. One goroutine calls Look, for each sample.
func (g *Guard) Look(s Sample) {
	guards := slices.ContainsFunc(s.Planned, func(r sharing.Resource) bool {
		return slices.ContainsFunc(r.Units, func(u sharing.Unit) bool { return u.Guard != (sharing.MemoryGuard{}) })
	})
	if !guards && !g.used { // Most nodes have no guards.
		return
	}
	report, now := s.Report, s.At
	report.SetLimits(s.GPUs, s.Planned, s.Listed, s.Held)
	g.mu.Lock()
	defer g.mu.Unlock()
	over := map[guarded]*overLimit{}
	g.held, g.used = map[string]bool{}, true
	for i := range report.Containers {
		c := &report.Containers[i]
		key := guarded{Container: c.Container, unit: c.Unit}
		if g.Pods.UID != nil {
			key.uid = g.Pods.UID(c.Namespace, c.Pod)
		}
		g.held[key.uid] = true
		if c.Excess() == 0 || key.uid == "" {
			continue
		}
		o := g.over[key]
		if o == nil || now.Sub(o.last) > max(3*s.Interval, longestGap) {
			o = &overLimit{since: now}
		}
		c.OverLimit = now.Sub(o.since) >= c.Guard.Grace
		if c.OverLimit && o.report.Text == "" {
			text := fmt.Sprintf("container %s of pod %s/%s uses %d MiB of %s and may use %d MiB, for longer than %s",
				c.Name, c.Namespace, c.Pod, int(*c.Memory)>>20, c.Unit, int(*c.Limit)>>20, c.Guard.Grace)
			o.report = nodereport.OverLimit{
				Unit:      c.Unit,
				Container: c.Container,
				Text:      text,
			}
			g.Logger.Warn("memory over the limit", "namespace", c.Namespace, "pod", c.Pod, "container", c.Name,
				"unit", c.Unit, "used", *c.Memory, "limit", *c.Limit)
		}
		o.last, o.use = now, *c
		over[key] = o
	}
	g.over = over
	for uid, at := range g.evicted {
		if report.Attributed && !g.held[uid] || now.Sub(at) > evictionWait {
			delete(g.evicted, uid)
		}
	}
	warning := ""
	if report.Unwatched && guards {
		warning = Unwatched
	}
	if warning != g.warning {
		g.warning = warning
		g.WarningsChanged()
	}
	g.LimitsChanged()
	g.wake.Notify()
}

// Run evicts the pods of containers over their limits, one after the other, until ctx ends.
func (g *Guard) Run(ctx context.Context) error {
	for {
		select {
		case <-g.wake:
			g.evictOne(ctx, time.Now())
		case <-ctx.Done():
			return nil
		}
	}
}

// worst returns the container to evict now: among those that the last sample showed over their
// limits for longer than the grace, the one with the most memory beyond its limit. It returns none
// while an evicted pod ends.
func (g *Guard) worst(now time.Time) (key guarded, found *overLimit) {
	if len(g.evicted) > 0 {
		return guarded{}, nil
	}
	for k, o := range g.over {
		if !o.use.OverLimit || !o.use.Guard.Evict || now.Before(o.next) || o.report.Evicted {
			continue
		}
		if found == nil || cmp.Or(cmp.Compare(o.use.Excess(), found.use.Excess()), cmp.Compare(key.uid, k.uid)) > 0 {
			key, found = k, o
		}
	}
	return key, found
}

func (g *Guard) evictOne(ctx context.Context, now time.Time) {
	g.mu.Lock()
	key, o := g.worst(now)
	if o == nil {
		g.mu.Unlock()
		return
	}
	o.next = now.Add(evictionPause)
	g.mu.Unlock()
	err := nodereport.ErrMayNotEvict
	if g.Pods.Evict != nil {
		err = g.Pods.Evict(ctx, key.Namespace, key.Pod, key.uid)
	}
	if ctx.Err() != nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	log := g.Logger.With("namespace", key.Namespace, "pod", key.Pod, "uid", key.uid)
	switch {
	case err == nil:
		g.evicted[key.uid] = now
		g.evictions["evicted"]++
		o.report.Evicted, o.report.Refused = true, ""
		log.Warn("pod evicted: memory over the limit", "text", o.report.Text)
	case errors.Is(err, nodereport.ErrPodGone):
		return
	default:
		result := "failed"
		if errors.Is(err, nodereport.ErrDisruptionBudget) {
			result, err = "refused", nodereport.ErrDisruptionBudget
		}
		if g.evictions[result]++; o.report.Refused != err.Error() {
			log.Warn("pod not evicted: memory over the limit", "error", err)
		}
		o.report.Refused = err.Error()
	}
	g.LimitsChanged()
}

// Warnings returns which guards of the profile cannot be watched.
func (g *Guard) Warnings() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.warning == "" {
		return nil
	}
	return []string{g.warning}
}

// Evictions returns the number of requests by result; nil if no profile has had a guard.
func (g *Guard) Evictions() map[string]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held == nil {
		return nil
	}
	return maps.Clone(g.evictions)
}

// OverLimits returns the containers over their limits for longer than the grace, sorted.
func (g *Guard) OverLimits() (list []nodereport.OverLimit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, o := range g.over {
		if o.report.Text != "" {
			list = append(list, o.report)
		}
	}
	slices.SortFunc(list, func(a, b nodereport.OverLimit) int {
		return cmp.Or(cmp.Compare(a.Unit, b.Unit), a.Compare(b.Container))
	})
	return list
}
