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

// refusedPause is how long a resource whose announcement was refused is not tried again.
// Permissions seldom change, and each try delays a switch.
const refusedPause = 5 * time.Minute

// announcer writes to the Node how many devices the kubelet is about to report.
type announcer struct {
	client client
	log    *slog.Logger
	// refused are the resources whose announcement was refused, with the time of the next try. Only
	// announce uses it, and its calls never overlap.
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

// Announces reports whether the Reporter writes to the Node's status, so that Announce may be called.
func (r *Reporter) Announces() bool { return r.options.Condition }

// Announcements counts the resources announced so far, by result: written, refused, failed.
func (r *Reporter) Announcements() map[string]uint64 {
	r.announcer.mu.Lock()
	defer r.announcer.mu.Unlock()
	return maps.Clone(r.announcer.results)
}

// Announce implements plugin.Announcer. It writes the number of devices of each resource, and the
// number of Healthy ones, to the Node's capacity and allocatable before the kubelet reports them.
// The kubelet corrects wrong numbers with its next report. A resource whose announcement is refused
// is logged once, and not tried again for a while. Calls must not overlap.
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
	for _, name := range names { // A policy may refuse some of the names only.
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

// note counts and logs the result of announcing the resources.
func (a *announcer) note(err error, now time.Time, names ...string) {
	count := uint64(len(names))
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err == nil:
		a.results["written"] += count
		for _, name := range names {
			delete(a.refused, name) // So the next refusal is logged again.
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

// isRefused reports whether the same request would be refused again: RBAC answers Forbidden, an
// admission policy Invalid or Forbidden.
func isRefused(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) }
