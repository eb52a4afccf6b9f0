package nvml

import (
	"cmp"
	"maps"
	"reflect"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// owner is Watch's goroutine, which has the ledger to itself. Whatever it takes
// in, it publishes once.
type owner struct {
	*Node
	known   *ledger
	changed func()
	// degraded says of each board why its events are not heard; "" when they are.
	degraded map[string]string
	// mine says that this program may keep fatal errors in the store; kept is
	// what is there.
	mine bool
	kept []sharing.FatalHealth
	// unkept is why they could not be kept the last time, "" when they could.
	unkept string
}

// look takes in a pass.
func (o *owner) look(p pass) {
	if p.err != nil {
		o.known.fail(p.err)
		o.publish(&snapshot{gpus: o.current.Load().gpus, err: p.err})
		return
	}
	o.known.enter(p, o.moment())
	o.publish(&snapshot{gpus: o.known.inventory()})
}

// listen takes in an event, and says whether the boards must be read again to
// understand it.
func (o *owner) listen(event Event) (again bool) {
	board, r, action, placed := o.known.event(event, o.moment())
	log := o.log.With("gpu", board, "type", uint64(event.Type), "data", event.Data, "gi", event.GI, "ci", event.CI)
	switch {
	case board == "":
		log.Warn("event of a board that is not known")
	case action == sharing.IgnoreError:
		log.Info("event that says nothing against the GPU")
	default:
		log.Warn("event against a GPU", "fault", r.reason.text, "action", action)
	}
	o.publishHealth()
	return !placed
}

// monitor takes in which boards' events are heard.
func (o *owner) monitor(degraded map[string]string) {
	for _, uuid := range slices.Sorted(maps.Keys(degraded)) {
		before, known := o.degraded[uuid]
		switch now := degraded[uuid]; {
		case now == before:
		case now != "":
			o.log.Warn("no events from a GPU, probes alone watch it", "gpu", uuid, "because", now)
		case known:
			o.log.Info("events from a GPU are heard again", "gpu", uuid)
		}
	}
	maps.Copy(o.degraded, degraded)
	o.tell()
}

// publishHealth publishes the GPUs when nothing was learned about the driver.
func (o *owner) publishHealth() {
	next := *o.current.Load()
	if len(o.known.records) > 0 {
		next.gpus = o.known.inventory()
	}
	o.publish(&next)
}

// publish shows what is known, if it is news.
func (o *owner) publish(next *snapshot) {
	o.keep()
	for _, change := range o.known.tally.take() {
		o.logChange(change)
		if o.options.Observer != nil {
			o.options.Observer.HealthChanged(change)
		}
	}
	o.tell()
	before := o.current.Load()
	if reflect.DeepEqual(before.gpus, next.gpus) && message(before.err) == message(next.err) {
		return
	}
	if next.err != nil {
		o.log.Error("the driver cannot be read", "error", next.err)
	}
	o.current.Store(next)
	o.changed()
}

// tell makes the health report anew.
func (o *owner) tell() {
	report := o.known.health()
	report.Monitors = []sharing.HealthMonitor{}
	for uuid := range o.known.records {
		if degraded, registered := o.degraded[uuid]; registered {
			report.Monitors = append(report.Monitors, sharing.HealthMonitor{GPU: uuid, Degraded: degraded})
		}
	}
	slices.SortFunc(report.Monitors, func(a, b sharing.HealthMonitor) int { return cmp.Compare(a.GPU, b.GPU) })
	o.report.Store(&report)
}

func (o *owner) logChange(c sharing.HealthChange) {
	log := o.log.With("unit", c.Unit, "gpu", c.GPU, "index", c.Index, "from", c.From, "to", c.State, "cause", c.Cause)
	switch c.State {
	case sharing.Healthy:
		log.Info("unit is healthy again", "was", c.Reason)
	case sharing.Recovering:
		log.Info("unit is recovering", "was", c.Reason)
	default:
		log.Warn("unit is faulty", "fault", c.Reason)
	}
}
