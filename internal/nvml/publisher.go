package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/sharing"
)

// publisher runs in Watch's goroutine, the only one that uses the tracker. It publishes once for
// each item that it handles.
type publisher struct {
	*Node
	tracker *tracker
	changed func()
	// degraded is the reason why a GPU's events are not received, by GPU; empty if they are
	// received.
	degraded map[string]string
	// advised holds, by GPU, the advice that was logged and is not a fault.
	advised map[string]string
	// saver and knownSaver are nil before RestoreHealth: until then the stores belong to an earlier
	// program.
	saver      *saver[FatalHealth]
	knownSaver *saver[KnownGPU]
}

// stop ends the publisher's work, and adds to the error what could not be ended.
func (p *publisher) stop(err error) error {
	if hung := deadlinesOf(p.lib).hung(); hung != "" {
		err = errors.Join(err, fmt.Errorf("abandoned %s, which the driver does not answer", hung))
	}
	limit := time.Now().Add(endGrace)
	return errors.Join(err, p.saver.stop(limit), p.knownSaver.stop(limit))
}

func (p *publisher) handleScan(scanned scanResult) {
	if scanned.err != nil {
		p.tracker.addFailure(scanned.err)
		p.publish(&snapshot{
			gpus:     p.current.Load().gpus,
			versions: p.Versions(),
			unlisted: p.Unlisted(),
			err:      scanned.err,
		})
		return
	}
	p.tracker.addScan(scanned, p.moment())
	unlisted := p.Unlisted()
	if scanned.compared {
		unlisted = p.tracker.unlistedText(scanned)
	}
	p.publish(&snapshot{
		gpus:     p.tracker.inventory(),
		versions: cmp.Or(scanned.versions, p.Versions()), // The result of a late GPU has none.
		unlisted: unlisted,
	})
}

// handleEvent reports whether the GPUs must be read again, to interpret the event or to get the
// driver's advice.
func (p *publisher) handleEvent(event receivedEvent) (again bool) {
	gpu, reported, action, assigned := p.tracker.addEvent(event, p.moment())
	log := p.log.With("gpu", gpu, "type", uint64(event.Type), "data", event.Data)
	if event.GI != WholeGPU {
		log = log.With("gi", event.GI)
	}
	if event.CI != WholeGPU {
		log = log.With("ci", event.CI)
	}
	advised := event.Type&(EventGPUUnavailable|EventRecoveryAction) != 0
	switch {
	case event.Type&EventRecoveryAction != 0:
		log.Info("the driver has other advice for a GPU")
	case action == sharing.IgnoreError:
		log.Info("GPU event ignored")
	case gpu != "" && p.tracker.gpus[gpu] == nil:
		log.Warn("event of a GPU that is not known")
	default:
		log.Warn("GPU event", "fault", reported.finding.text, "action", action)
	}
	p.publishFaults()
	return advised || !assigned
}

func (p *publisher) handleMonitors(degraded map[string]string) {
	for _, uuid := range slices.Sorted(maps.Keys(degraded)) {
		before, known := p.degraded[uuid]
		switch now := degraded[uuid]; {
		case now == before:
		case now != "":
			p.log.Warn("no events from a GPU, probes alone watch it", "gpu", uuid, "because", now)
		case known:
			p.log.Info("events from a GPU are received again", "gpu", uuid)
		}
	}
	maps.Copy(p.degraded, degraded)
	p.publishReport()
}

// publishFaults publishes the GPUs when there is no new information about the driver.
func (p *publisher) publishFaults() {
	next := *p.current.Load()
	if len(p.tracker.gpus) > 0 {
		next.gpus = p.tracker.inventory()
	}
	p.publish(&next)
}

// publish makes next the inventory if it differs from the current one. Only after that does it have
// fatal errors saved.
func (p *publisher) publish(next *snapshot) {
	for _, change := range p.tracker.counters.changes {
		p.logChange(change)
	}
	p.tracker.counters.changes = nil
	p.publishReport()
	before := p.current.Load()
	next.complete = before.complete || p.saver != nil && p.tracker.complete
	if !reflect.DeepEqual(before.gpus, next.gpus) || before.complete != next.complete ||
		before.versions != next.versions || before.unlisted != next.unlisted ||
		message(before.err) != message(next.err) {
		if next.err != nil {
			p.log.Error("the driver cannot be read", "error", next.err)
		}
		if next.unlisted != before.unlisted {
			p.log.Warn("GPUs that the driver does not list", "now", next.unlisted, "before", before.unlisted)
		}
		p.current.Store(next)
		p.changed()
	}
	if p.saver != nil {
		p.saver.save(p.tracker.fatalErrors(p.options.Boot))
		p.knownSaver.save(p.tracker.knownGPUs())
	}
}

func (p *publisher) publishReport() {
	resets := map[string]int{}
	for uuid, gpu := range p.tracker.gpus {
		resets[uuid] = gpu.resets
	}
	p.resets.Store(&resets)
	report := p.tracker.health(*p.rules.Load())
	report.Monitors = []sharing.HealthMonitor{}
	for uuid, gpu := range p.tracker.gpus {
		if degraded, registered := p.degraded[uuid]; registered {
			monitor := sharing.HealthMonitor{GPU: uuid, Degraded: degraded}
			if told := gpu.marks.RowRemap; told != "" {
				monitor.RowRemapPending = new(told == waiting)
			}
			if advice := adviceOf(gpu.recovery); advice.harmless {
				monitor.Advice = advice.asks
			}
			if monitor.Advice != p.advised[uuid] {
				p.logAdvice(uuid, monitor.Advice)
			}
			report.Monitors = append(report.Monitors, monitor)
		}
	}
	slices.SortFunc(report.Monitors, func(a, b sharing.HealthMonitor) int { return cmp.Compare(a.GPU, b.GPU) })
	p.report.Store(&report)
}

func (p *publisher) logAdvice(gpu, asks string) {
	p.advised[gpu] = asks
	if asks == "" {
		p.log.Info("the driver's advice for a GPU is over", "gpu", gpu)
		return
	}
	p.log.Warn("the driver advises for a GPU what is no fault, its devices stay in use", "gpu", gpu, "asks", asks)
}

func (p *publisher) logChange(c healthChange) {
	log := p.log.With("unit", c.Unit, "gpu", c.GPU, "index", c.Index, "from", c.From, "to", c.State, "cause", c.Cause)
	switch c.State {
	case sharing.Healthy:
		log.Info("unit is healthy again", "was", c.Reason)
	case sharing.Recovering:
		log.Info("unit is recovering", "was", c.Reason)
	default:
		log.Warn("unit is faulty", "fault", c.Reason, "explanation", c.Explanation)
	}
}

// saver saves the latest list in the store, in a goroutine of its own: the kubelet must learn of a
// fault before a disk has synced it.
type saver[T any] struct {
	store Store[T]
	log   *slog.Logger
	// given is the list that the goroutine last got. lists has room for one list that the goroutine
	// has not received yet; a newer one replaces it.
	given  []T
	lists  chan []T
	failed atomic.Bool
	done   chan struct{}
}

// startSaver starts the goroutine. stored is the current content of the store.
func startSaver[T any](store Store[T], stored []T, log *slog.Logger) *saver[T] {
	s := &saver[T]{
		store: store,
		log:   log,
		given: stored,
		lists: make(chan []T, 1),
		done:  make(chan struct{}),
	}
	go s.run()
	return s
}

// save has the list saved if it differs from the last one, or if saving the last one failed.
func (s *saver[T]) save(list []T) {
	same := len(list) == 0 && len(s.given) == 0 || reflect.DeepEqual(list, s.given)
	if same && !s.failed.Load() {
		return
	}
	s.given = list
	select {
	case <-s.lists:
	default:
	}
	s.lists <- list
}

func (s *saver[T]) run() {
	defer close(s.done)
	logged := ""
	for list := range s.lists {
		err := s.store.Save(list)
		if err != nil && err.Error() != logged {
			s.log.Error("fatal errors or indexes of GPUs not kept for a restart", "error", err)
		}
		logged = message(err)
		s.failed.Store(err != nil)
	}
}

// stop waits until the latest list is saved, or until the limit. It does nothing for a nil saver.
func (s *saver[T]) stop(limit time.Time) error {
	if s == nil {
		return nil
	}
	close(s.lists)
	select {
	case <-s.done:
		return nil
	case <-time.After(time.Until(limit)):
		return errors.New("abandoned the saving of fatal errors or indexes, which the disk does not finish")
	}
}
