package nodestatus

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// refusedPause is how long a resource that may not be announced is not tried again: rights seldom
// change, and each try delays a switch.
const refusedPause = 5 * time.Minute

// announcer writes to the Node how many devices the kubelet is going to report.
type announcer struct {
	client client
	log    *slog.Logger
	// refused are the resources that may not be announced, with the time to try again. Only the
	// goroutine that calls Announce uses it.
	refused map[string]time.Time

	mu      sync.Mutex
	results map[string]uint64
}

func newAnnouncer(client client, log *slog.Logger) *announcer {
	return &announcer{
		client:  client,
		log:     log,
		refused: map[string]time.Time{},
		results: map[string]uint64{
			"written": 0,
			"refused": 0,
			"failed":  0,
		},
	}
}

// Announces says that Announce may be called: the Reporter writes to the Node's status.
func (r *Reporter) Announces() bool { return r.options.Condition }

// Announcements counts the resources that were announced until now, by what became of it: written,
// refused, failed.
func (r *Reporter) Announcements() map[string]uint64 {
	r.announcer.mu.Lock()
	defer r.announcer.mu.Unlock()
	return maps.Clone(r.announcer.results)
}

// Announce writes how many devices resources have, and how many of them are Healthy, to the
// capacity and the allocatable of the Node, where the kubelet would report them later. The kubelet
// corrects what is wrong at its next report. It is plugin.Announcer. A resource that may not be
// written is logged once, and not tried again for a while. One goroutine calls it.
func (r *Reporter) Announce(ctx context.Context, capacity, allocatable map[string]int) (written map[string]bool) {
	return r.announcer.announce(ctx, capacity, allocatable)
}

func (a *announcer) announce(ctx context.Context, capacity, allocatable map[string]int) (written map[string]bool) {
	now := time.Now()
	var names []string
	for _, name := range slices.Sorted(maps.Keys(capacity)) {
		if now.After(a.refused[name]) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	written = map[string]bool{}
	note := func(err error, names ...string) {
		a.note(err, now, names...)
		for _, name := range names {
			written[name] = err == nil
		}
	}
	err := a.patch(ctx, names, capacity, allocatable)
	if len(names) == 1 || !isRefused(err) {
		note(err, names...)
		return written
	}
	for _, name := range names { // A policy goes by their names, so maybe one of them alone is refused.
		note(a.patch(ctx, []string{name}, capacity, allocatable), name)
	}
	return written
}

func (a *announcer) patch(ctx context.Context, names []string, capacity, allocatable map[string]int) error {
	quantities := func(counts map[string]int) map[string]string {
		texts := map[string]string{}
		for _, name := range names {
			texts[name] = strconv.Itoa(counts[name])
		}
		return texts
	}
	patch := map[string]any{"status": map[string]any{
		"capacity":    quantities(capacity),
		"allocatable": quantities(allocatable),
	}}
	return a.client.patchNode(ctx, types.StrategicMergePatchType, patch, "status")
}

// note counts what became of the resources' announcement.
func (a *announcer) note(err error, now time.Time, names ...string) {
	count := uint64(len(names))
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err == nil:
		a.results["written"] += count
		for _, name := range names {
			delete(a.refused, name) // The next refusal is news.
		}
	case isRefused(err):
		a.results["refused"] += count
		for _, name := range names {
			if a.refused[name].IsZero() {
				a.log.Warn("the scheduler learns of this resource's changes from the kubelet alone, up to 10 s late",
					"resource", name, "error", err)
			}
			a.refused[name] = now.Add(refusedPause)
		}
	default:
		a.results["failed"] += count
		a.log.Info("a change was not announced to the scheduler, which learns of it from the kubelet", "resources",
			names, "error", err)
	}
}

// isRefused says that the same request would be refused again: RBAC answers Forbidden, an
// admission policy Invalid or Forbidden.
func isRefused(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) }
