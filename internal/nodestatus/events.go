package nodestatus

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// Reasons of the Events.
const (
	// ReasonProfileApplied: a different profile is now in force.
	ReasonProfileApplied = "ProfileApplied"
	// ReasonProfileRejected: the wanted profile cannot be used. The message has its first problem.
	ReasonProfileRejected = "ProfileRejected"
	// ReasonSwitchWaiting: a GPU or partition waits for pods before it is offered as the profile
	// wants. The message names it and the pods. ReasonSwitchComplete: it no longer waits.
	ReasonSwitchWaiting  = "SwitchWaiting"
	ReasonSwitchComplete = "SwitchComplete"
	// ReasonGPUUnhealthy: a GPU or partition must not be used. The message says why.
	ReasonGPUUnhealthy = "GPUUnhealthy"
	// ReasonGPURecovered: it may be used again. The message says what was wrong.
	ReasonGPURecovered = "GPURecovered"
	// ReasonGPUsRenumbered: the driver has GPUs under other indexes than before. The message names them.
	ReasonGPUsRenumbered = "GPUsRenumbered"
	// ReasonMIGApplied: a GPU has its wanted MIG layout.
	ReasonMIGApplied = "MIGApplied"
	// ReasonMIGBlocked: partitions in use block the layout. The message names them.
	ReasonMIGBlocked = "MIGBlocked"
	// ReasonMIGFailed: the GPU cannot have the layout, or the driver refused it.
	ReasonMIGFailed = "MIGFailed"
	// ReasonMemoryOverLimit: a container uses more memory of a GPU or partition than the profile
	// allows. ReasonEvicted: its pod is evicted for that. ReasonEvictionRefused: its pod is not
	// evicted, and the message says why.
	ReasonMemoryOverLimit = "MemoryOverLimit"
	ReasonEvicted         = "MemoryOverLimitEvicted"
	ReasonEvictionRefused = "EvictionRefused"
	// ReasonMIGResetRequired: the GPU's MIG mode changes only after a reset. An operator of the node
	// resets the GPU, or Virgate does if the profile has mig.reset and the process is allowed to.
	ReasonMIGResetRequired = "MIGResetRequired"
)

// eventText is what an Event says. Equal texts become one Event with a count.
type eventText struct{ kind, reason, message string }

func warning(reason, format string, arguments ...any) eventText {
	return eventText{corev1.EventTypeWarning, reason, truncate(fmt.Sprintf(format, arguments...))}
}

func normal(reason, format string, arguments ...any) eventText {
	return eventText{corev1.EventTypeNormal, reason, truncate(fmt.Sprintf(format, arguments...))}
}

// newEvents returns what has happened between two reports. last is nil for the first report: then
// everything that is not as it should be is an event.
func newEvents(last *nodereport.Report, next nodereport.Report) []eventText {
	if last == nil {
		last = &nodereport.Report{}
	}
	var events []eventText
	if next.State == nodereport.ProfileRejected &&
		(last.State != nodereport.ProfileRejected || last.Problem != next.Problem || !last.Wanted.Same(next.Wanted)) {
		events = append(events, warning(ReasonProfileRejected, "%s is refused, %s: %s", describeProfile(next.Wanted),
			describeInForce(next.Applied), next.Problem))
	}
	if !next.Applied.Same(last.Applied) {
		events = append(events, normal(ReasonProfileApplied, "%s is in force, generation %s",
			describeProfile(next.Applied), next.Applied.Generation))
	}
	if next.Renumbering != "" && next.Renumbering != last.Renumbering {
		events = append(events, warning(ReasonGPUsRenumbered, "%s", next.Renumbering))
	}
	events = append(events, healthEvents(last.Units, next)...)
	events = append(events, overLimitEvents(last.OverLimit, next.OverLimit)...)
	events = append(events, layoutEvents(last.Layouts, next.Layouts)...)
	return append(events, waitEvents(*last, next)...)
}

// healthEvents returns what has happened to units, with the pods that hold them. Each change of a
// unit's state to suspect or unhealthy, and each change of the reason, is an event. A recovery is
// an event once the unit is healthy.
func healthEvents(last []sharing.UnitHealth, next nodereport.Report) []eventText {
	before := make(map[string]sharing.UnitHealth, len(last))
	for _, unit := range last {
		before[unit.Unit] = unit
	}
	var events []eventText
	for _, unit := range next.Units {
		was, known := before[unit.Unit]
		switch unit.State {
		case sharing.Suspect, sharing.Unhealthy:
			if was.State != unit.State || was.Reason != unit.Reason {
				pods := cmp.Or(strings.Join(next.Hit[unit.Unit], ", "), "no pod that is known")
				events = append(events, warning(ReasonGPUUnhealthy, "%s is %s: %s (%s); held by %s", describeUnit(unit),
					unit.State, unit.Reason, unit.Explanation, pods))
			}
		case sharing.Healthy:
			if known && was.State != sharing.Healthy {
				events = append(events, normal(ReasonGPURecovered, "%s is healthy again, it had: %s",
					describeUnit(unit), was.Reason))
			}
		case sharing.Recovering:
		}
	}
	return events
}

// overLimitEvents returns what has happened to containers that use too much memory. A container
// that no longer does is no event.
func overLimitEvents(last, next []nodereport.OverLimit) (events []eventText) {
	for _, o := range next {
		var was nodereport.OverLimit
		if i := slices.IndexFunc(last,
			func(l nodereport.OverLimit) bool { return l.Unit == o.Unit && l.Container == o.Container }); i >= 0 {
			was = last[i]
		}
		if was.Text != o.Text {
			events = append(events, warning(ReasonMemoryOverLimit, "%s", o.Text))
		}
		if o.Evicted && !was.Evicted {
			events = append(events, warning(ReasonEvicted, "pod %s/%s is evicted: %s", o.Namespace, o.Pod, o.Text))
		}
		if o.Refused != "" && o.Refused != was.Refused {
			events = append(events, warning(ReasonEvictionRefused, "pod %s/%s is not evicted: %s", o.Namespace, o.Pod,
				o.Refused))
		}
	}
	return events
}

func describeUnit(unit sharing.UnitHealth) string {
	if unit.Unit == unit.GPU {
		return fmt.Sprintf("GPU %s (%s)", unit.Index, unit.Unit)
	}
	return fmt.Sprintf("partition %s (%s) of %s", unit.Index, unit.Unit, unit.GPU)
}

// describeProfile names a profile: "profile a100 of ConfigMap gpu/profiles". If rules choose the
// profile, it also says why: "profile a100 by rule 2 of ConfigMap gpu/profiles".
func describeProfile(p nodereport.ProfileRef) string {
	if p.Name != "" && p.By != "" && p.Rules != "" {
		return "profile " + p.Chosen()
	}
	words := []string{"profile"}
	if p.Name != "" {
		words = append(words, p.Name)
	}
	if p.Source != "" {
		words = append(words, "of", p.Source)
	}
	return strings.Join(words, " ")
}

func describeInForce(applied nodereport.ProfileRef) string {
	if applied == (nodereport.ProfileRef{}) {
		return "none is in force"
	}
	return "generation " + applied.Generation + " stays in force"
}

// layoutEvents returns what has happened to GPUs whose MIG layout Virgate changes. A change in
// progress is no event, and neither is a GPU that had its layout from the start.
func layoutEvents(last, next []nodereport.GPULayout) []eventText {
	before := make(map[string]nodereport.GPULayout, len(last))
	for _, gpu := range last {
		before[gpu.GPU] = gpu
	}
	reasons := map[nodereport.LayoutState]string{
		nodereport.LayoutBlocked:       ReasonMIGBlocked,
		nodereport.LayoutFailed:        ReasonMIGFailed,
		nodereport.LayoutResetRequired: ReasonMIGResetRequired,
	}
	var events []eventText
	for _, gpu := range next {
		was, known := before[gpu.GPU]
		if known && was.State == gpu.State && was.Reason == gpu.Reason && was.Wanted == gpu.Wanted {
			continue
		}
		if reason, waits := reasons[gpu.State]; waits {
			events = append(events, warning(reason, "%s", gpu))
		} else if known && gpu.State == nodereport.LayoutApplied {
			events = append(events, normal(ReasonMIGApplied, "GPU %d (%s) has layout %s", gpu.Index, gpu.GPU,
				gpu.Wanted))
		}
	}
	return events
}

// waitEvents returns what has happened to units that wait for their holders: they begin to wait, or
// no longer do. The end of one of several pods is no event. layoutEvents covers GPUs on their way
// to a MIG layout.
func waitEvents(last, next nodereport.Report) []eventText {
	inLayouts := func(gpu string) bool {
		return slices.ContainsFunc(next.Layouts,
			func(l nodereport.GPULayout) bool { return l.GPU == gpu && l.State != nodereport.LayoutApplied })
	}
	before := map[string]nodereport.Wait{}
	for _, w := range last.Waits {
		before[w.Unit] = w
	}
	var events []eventText
	for _, w := range next.Waits {
		was, waited := before[w.Unit]
		delete(before, w.Unit)
		if (!waited || len(was.Pods) == 0 && len(w.Pods) > 0) && !inLayouts(w.GPU) {
			events = append(events, warning(ReasonSwitchWaiting,
				"%s until they end; it is not offered as the profile wants meanwhile", w))
		}
	}
	for _, w := range last.Waits {
		if _, ended := before[w.Unit]; ended && !inLayouts(w.GPU) {
			events = append(events, normal(ReasonSwitchComplete, "%s no longer waits for a pod", w.Name()))
		}
	}
	return events
}

const (
	// maxQueued limits how many different events are remembered.
	maxQueued = 64
	// countsFor is how long after its last occurrence a repeated event still counts as the same.
	// The API forgets an event that has not changed for an hour (kube-apiserver, --event-ttl).
	countsFor = 50 * time.Minute
)

// series is an event that is or will be in the API.
type series struct {
	eventText
	// name is the name of the Event. created is true if the API has it.
	name    string
	created bool
	// count is how often the event happened, and written is the count that the API knows.
	count, written int32
	first, last    time.Time
	// next is the earliest time of the next write.
	next time.Time
}

func (s *series) waits() bool { return s.count > s.written }

// eventQueue has the events that happened, with equal ones merged. It never grows beyond maxQueued,
// however long the API server is unreachable and whatever flaps.
//
// client-go's tools/record would drop what is not written within two minutes (12 attempts, 10 s
// apart), replace messages by "(combined from similar events)", write each repetition at once, and
// leave a goroutine behind at the end (v0.36, tools/record/event.go and events_cache.go).
type eventQueue struct {
	timing  timing
	mutex   sync.Mutex
	series  []*series // in the order in which they last happened
	dropped int
	limit   *rate.Limiter
}

func newEventQueue(timing timing) *eventQueue {
	return &eventQueue{timing: timing, limit: rate.NewLimiter(rate.Every(timing.between), timing.burst)}
}

func (q *eventQueue) add(n eventText, at time.Time) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	if i := slices.IndexFunc(q.series,
		func(s *series) bool { return s.eventText == n && at.Sub(s.last) < countsFor }); i >= 0 {
		s := q.series[i]
		s.count++
		s.last = at
		q.series = append(slices.Delete(q.series, i, i+1), s)
		return
	}
	if len(q.series) >= maxQueued {
		q.drop()
	}
	s := &series{
		eventText: n,
		count:     1,
		first:     at,
		last:      at,
	}
	if n.reason == ReasonMIGBlocked {
		s.next = at.Add(q.timing.blocked)
	}
	q.series = append(q.series, s)
}

// drop makes room: it removes the oldest event that is already written, or else the oldest.
func (q *eventQueue) drop() {
	i := max(0, slices.IndexFunc(q.series, func(s *series) bool { return !s.waits() }))
	if q.series[i].waits() {
		q.dropped++
	}
	q.series = slices.Delete(q.series, i, i+1)
}

// next returns a copy of the event to write now. If there is none, ok is false, and after is how
// long until there may be one, 0 for never.
func (q *eventQueue) next(now time.Time) (s series, after time.Duration, ok bool) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	var first *series
	for _, s := range q.series {
		if s.waits() && (first == nil || s.next.Before(first.next)) {
			first = s
		}
	}
	if first == nil {
		return series{}, 0, false
	}
	if wait := first.next.Sub(now); wait > 0 {
		return series{}, wait, false
	}
	if tokens := q.limit.TokensAt(now); tokens < 1 {
		return series{}, time.Duration((1 - tokens) * float64(q.timing.between)), false
	}
	if first.name == "" {
		// The random part tells apart nodes that create an event at the same time.
		first.name = kube.FieldManager + "." + strconv.FormatInt(now.UnixNano(), 16) + "." + rand.String(8)
	}
	return *first, 0, true
}

// forget removes the event that next returned, unless it has happened again since.
func (q *eventQueue) forget(s series) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	q.series = slices.DeleteFunc(q.series, func(known *series) bool {
		return known.eventText == s.eventText && known.name == s.name && known.count == s.count
	})
}

// written records that the API server has s as next returned it or, if lost is true, has forgotten it.
func (q *eventQueue) written(s series, now time.Time, lost bool) {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	q.limit.AllowN(now, 1)
	i := slices.IndexFunc(q.series,
		func(other *series) bool { return other.eventText == s.eventText && other.name == s.name })
	if i < 0 {
		return
	}
	known := q.series[i]
	if lost {
		known.name, known.created = "", false
		known.count -= known.written
		known.written, known.first = 0, known.last
		return
	}
	known.created = true
	known.written = s.count
	known.next = now.Add(q.timing.repeat)
}

// takeDropped returns how many events were dropped unwritten since the last call.
func (q *eventQueue) takeDropped() int {
	q.mutex.Lock()
	defer q.mutex.Unlock()
	dropped := q.dropped
	q.dropped = 0
	return dropped
}

// eventWriter writes the events of the queue. Events name a Node, and outlive it.
type eventWriter struct {
	queue  *eventQueue
	client client
	log    *slog.Logger
}

func (w *eventWriter) write(ctx context.Context, report nodereport.Report) (again time.Duration, err error) {
	if dropped := w.queue.takeDropped(); dropped > 0 {
		w.log.Warn("events never written", "count", dropped)
	}
	for {
		s, after, ok := w.queue.next(time.Now())
		if !ok {
			return after, nil
		}
		if s.reason == ReasonMIGBlocked && !slices.Contains(layoutEvents(nil, report.Layouts), s.eventText) {
			w.queue.forget(s) // It was blocked only for a moment.
			continue
		}
		if s.created {
			err = w.client.patchEvent(ctx, s.name,
				map[string]any{"count": s.count, "lastTimestamp": metav1.NewTime(s.last)})
		} else {
			err = w.client.createEvent(ctx, eventOf(s, w.client.node))
		}
		lost := s.created && apierrors.IsNotFound(err)
		switch {
		case err == nil, lost:
		case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
			// It would be refused every time, while other events wait behind it.
			w.log.Error("event refused", "error", err)
		default:
			return 0, err
		}
		w.queue.written(s, time.Now(), lost)
	}
}

// eventOf returns the Event of a series. Events about a Node are in the namespace "default". They
// identify the Node as the kubelet does, with its name also in place of the UID: kubectl describe
// searches for both.
func eventOf(s series, node string) *corev1.Event {
	return &corev1.Event{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
		ObjectMeta: metav1.ObjectMeta{Name: s.name, Namespace: metav1.NamespaceDefault},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: "v1",
			Kind:       "Node",
			Name:       node,
			UID:        types.UID(node),
		},
		Type:                s.kind,
		Reason:              s.reason,
		Message:             s.message,
		Count:               s.count,
		FirstTimestamp:      metav1.NewTime(s.first),
		LastTimestamp:       metav1.NewTime(s.last),
		Source:              corev1.EventSource{Component: kube.FieldManager, Host: node},
		ReportingController: kube.FieldManager,
		ReportingInstance:   node,
	}
}

// truncate shortens text to at most maxMessage bytes, without splitting a character, and marks the cut.
func truncate(text string) string {
	const mark = "…"
	if len(text) <= maxMessage {
		return text
	}
	return strings.ToValidUTF8(text[:maxMessage-len(mark)], "") + mark
}
