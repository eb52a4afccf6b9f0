// Package memoryguard watches which containers use more of a GPU's memory than the profile lets
// them, and evicts their pods where the profile and the operator want that. It judges by samples
// that others take.
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
	"github.com/virgate/virgate/sharing"
)

// Pods are what the guard needs to know of pods, and to do to them.
type Pods struct {
	// UID is the pod's; empty where it is not certain. Nil where nobody follows pods.
	UID func(namespace, pod string) string
	// Evict evicts the pod if it has the UID, within seconds. Its errors are
	// nodereport.ErrDisruptionBudget, ErrMayNotEvict, ErrPodGone or others. Nil where that is
	// not allowed.
	Evict func(ctx context.Context, namespace, pod, uid string) error
}

const (
	// evictionWait is how long a pod that is evicted may take to end before another one is;
	// evictionPause is the time after which a refused eviction is asked for again.
	evictionWait  = 10 * time.Minute
	evictionPause = 10 * time.Second
	// longestGap is the time between two samples, or three intervals of them, after which nothing
	// is known of what was between.
	longestGap = 15 * time.Second
)

// Options are what a guard needs.
type Options struct {
	Pods   Pods
	Logger *slog.Logger
	// WarningsChanged and LimitsChanged are called when Warnings and OverLimits may answer
	// otherwise. They must not wait.
	WarningsChanged, LimitsChanged func()
}

// Guard watches which containers use more memory than the profile lets them.
type Guard struct {
	Options
	// wake has room to tell Run that there is a new sample. used says that a profile of this run
	// has had a guard; only Look uses it.
	wake chan struct{}
	used bool

	mu sync.Mutex
	// over are the containers over their limits.
	over map[guarded]*overLimit
	// evicted are pods that are being evicted, by UID, with the time when that was asked for.
	evicted map[string]time.Time
	// held are the UIDs of pods of which the last sample showed containers.
	held map[string]bool
	// evictions counts what was asked for, by result.
	evictions map[string]int
	// warning says why nobody watches what the profile wants guarded; empty if somebody does.
	warning string
}

// guarded is a container of one pod, and not of another one of that name, on a unit.
type guarded struct {
	sharing.Container
	unit, uid string
}

// overLimit is such a container while it uses too much.
type overLimit struct {
	since, last time.Time
	use         sharing.ContainerUtilization
	report      nodereport.OverLimit
	// next is when its eviction may be asked for.
	next time.Time
}

// New returns a guard that knows of nobody yet.
func New(options Options) *Guard {
	return &Guard{
		Options: options,
		wake:    make(chan struct{}, 1),
		evicted: map[string]time.Time{},
		evictions: map[string]int{
			"evicted": 0,
			"refused": 0,
			"failed":  0,
		},
	}
}

// Unwatched is the warning about a profile that guards memory where nobody can.
const Unwatched = "memory: nobody watches what containers use: it takes --watch-pods and the host's PIDs, " +
	"which are the chart's metrics.perContainer"

// Sample is who used how much memory at one moment, and what the guard judges that by.
type Sample struct {
	Report sharing.UtilizationReport
	GPUs   []sharing.GPU
	// Planned is what the profile wants, Listed what the kubelet is told, Held who holds what.
	Planned, Listed []sharing.Resource
	Held            []sharing.Allocation
	// At is when it was taken, Interval the time between two samples.
	At       time.Time
	Interval time.Duration
}

// Look gives the report's containers their limits, and notes who has been over one for how long.
// What is not certain now was not certain since the last sample either, so it begins anew. One
// goroutine calls it, for each sample.
func (g *Guard) Look(s Sample) {
	guards := slices.ContainsFunc(s.Planned, func(r sharing.Resource) bool {
		return slices.ContainsFunc(r.Units, func(u sharing.Unit) bool { return u.Guard != (sharing.MemoryGuard{}) })
	})
	if !guards && !g.used { // As on most nodes.
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
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// Run evicts, one after the other, pods of containers that use too much, until ctx ends.
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

// worst is the container to evict now: of those that were over their limits in the last
// sample, for longer than the grace, the one with the most memory beyond its limit. There is
// none while an evicted pod ends.
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
		} else if errors.Is(err, nodereport.ErrMayNotEvict) {
			err = nodereport.ErrMayNotEvict
		}
		if g.evictions[result]++; o.report.Refused != err.Error() {
			log.Warn("pod not evicted: memory over the limit", "error", err)
		}
		o.report.Refused = err.Error()
	}
	g.LimitsChanged()
}

// Warnings say what the profile wants guarded and nobody can watch.
func (g *Guard) Warnings() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.warning == "" {
		return nil
	}
	return []string{g.warning}
}

// Evictions counts those that were asked for, by result; nil where no profile has had a guard.
func (g *Guard) Evictions() map[string]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held == nil {
		return nil
	}
	return maps.Clone(g.evictions)
}

// OverLimits are the containers over their limits for longer than the grace, in order.
func (g *Guard) OverLimits() (list []nodereport.OverLimit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, o := range g.over {
		if o.report.Text != "" {
			list = append(list, o.report)
		}
	}
	slices.SortFunc(list, func(a, b nodereport.OverLimit) int {
		return cmp.Or(
			cmp.Compare(a.Unit, b.Unit),
			cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Name, b.Name),
		)
	})
	return list
}
