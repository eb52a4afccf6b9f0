package nvml

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/sharing"
)

const (
	gpuHandle = Device(1)
	gpuUUID   = "GPU-0"
	partUUID  = "MIG-0"
)

func at(seconds int) moment {
	return moment{now: time.Unix(0, 0).Add(time.Duration(seconds) * time.Second), rules: sharing.DefaultHealthRules()}
}

// seen is a full pass over one GPU, with its partition or without.
func seen(partitions ...sharing.Partition) scanResult {
	gpu := sharing.GPU{UUID: gpuUUID, MIG: true, Partitions: partitions}
	return scanResult{complete: true, readings: []reading{{gpu: gpu, device: gpuHandle, findings: map[string][]finding{}}}}
}

func partition() sharing.Partition { return sharing.Partition{UUID: partUUID, GI: 1} }

func xid(code uint64, gi uint32) Event {
	return Event{Device: gpuHandle, Type: EventXIDCritical, Data: code, GI: gi}
}

// TestTrackerForgets checks that faults of removed partitions, and events from before a reset, are dropped.
func TestTrackerForgets(t *testing.T) {
	known := newTracker(newGate().index)
	known.addScan(seen(partition()), at(0))
	if _, _, _, placed := known.addEvent(receivedEvent{Event: xid(94, 1)}, at(0)); !placed {
		t.Fatal("the event was not placed")
	}
	known.addScan(seen(), at(10))
	if _, kept := known.gpus[gpuUUID].units[partUUID]; kept {
		t.Error("kept the health of no unit")
	}

	// The partition is not known now, and then the GPU is reset.
	for range 3 {
		if _, _, _, placed := known.addEvent(receivedEvent{Event: xid(94, 1)}, at(10)); placed {
			t.Fatal("the event was placed")
		}
	}
	if kept := known.gpus[gpuUUID].unassigned; len(kept) != 1 {
		t.Errorf("kept %d times the same event", len(kept))
	}
	reset := seen(partition())
	reset.readings[0].reset = true
	known.addScan(reset, at(20))
	if got := known.inventory()[0].Partitions[0].Health.Reason; got != "" {
		t.Errorf("fault %q of before the reset", got)
	}
}

// TestTrackerEvidence checks what counts as evidence that a GPU was reset.
func TestTrackerEvidence(t *testing.T) {
	absent := func() scanResult { return scanResult{complete: true} }
	unread := func(why finding) scanResult {
		return scanResult{complete: true, unreadable: map[string]finding{gpuUUID: why}}
	}
	with := func(driver string) scanResult {
		p := seen()
		p.driver = driver
		return p
	}
	tests := []struct {
		name string
		then []func(*tracker)
		want sharing.HealthState
	}{
		{"nothing", nil, sharing.Unhealthy},
		{"it was not listed", []func(*tracker){func(l *tracker) { l.addScan(absent(), at(10)) }}, sharing.Recovering},
		{"it was lost", []func(*tracker){func(l *tracker) { l.addScan(unread(lostFinding()), at(10)) }}, sharing.Recovering},
		{"it could not be read", []func(*tracker){func(l *tracker) { l.addScan(unread(unreadableFinding(Unknown)), at(10)) }}, sharing.Unhealthy},
		{"it was lost, and then could not be read", []func(*tracker){
			func(l *tracker) { l.addScan(unread(lostFinding()), at(10)) }, func(l *tracker) { l.addScan(unread(unreadableFinding(Unknown)), at(20)) },
		}, sharing.Recovering},
		{"it may be what could not be read", []func(*tracker){func(l *tracker) { l.addScan(scanResult{complete: true, uncertain: true}, at(10)) }}, sharing.Unhealthy},
		{"it was read late, after another driver came", []func(*tracker){
			func(l *tracker) { l.addScan(with("1"), at(10)) }, func(l *tracker) { l.addScan(scanResult{driver: "2"}, at(20)) },
		}, sharing.Recovering},
		{"it has not answered yet", []func(*tracker){func(l *tracker) {
			l.addScan(scanResult{complete: true, pending: map[string]bool{gpuUUID: true}}, at(10))
		}}, sharing.Unhealthy},
		{"another GPU was late", []func(*tracker){func(l *tracker) { l.addScan(scanResult{}, at(10)) }}, sharing.Unhealthy},
		{"no driver was loaded", []func(*tracker){func(l *tracker) { l.addFailure(&Error{Call: "Init", Return: DriverNotLoaded}) }}, sharing.Recovering},
		{"the driver hiccuped", []func(*tracker){func(l *tracker) { l.addFailure(&Error{Call: "Init", Return: Uninitialized}) }}, sharing.Unhealthy},
		{"another driver", []func(*tracker){func(l *tracker) { l.addScan(with("1"), at(10)) }, func(l *tracker) { l.addScan(with("2"), at(20)) }}, sharing.Recovering},
		{"the same driver", []func(*tracker){func(l *tracker) { l.addScan(with("1"), at(10)) }, func(l *tracker) { l.addScan(with("1"), at(20)) }}, sharing.Unhealthy},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			known := newTracker(newGate().index)
			known.addScan(seen(), at(0))
			known.addEvent(receivedEvent{Event: xid(79, WholeGPU)}, at(0))
			for _, step := range test.then {
				step(known)
			}
			if test.name != "another driver" && test.name != "the same driver" {
				known.addScan(seen(), at(30))
			}
			if got := known.gpus[gpuUUID].units[gpuUUID].state; got != test.want {
				t.Errorf("state %s, want %s", got, test.want)
			}
		})
	}
}

// TestTrackerLate checks that a late look at an unidentified GPU does not make missing GPUs faulty.
func TestTrackerLate(t *testing.T) {
	known := newTracker(newGate().index)
	known.addScan(seen(), at(0))
	known.addScan(scanResult{uncertain: true}, at(10))
	if got := known.inventory()[0].Health.Reason; got != "" {
		t.Errorf("fault %q", got)
	}
}

// TestTrackerClear checks that clearing a GPU clears its partitions too, that clearing a partition clears only
// it, and that faults found by probes stay.
func TestTrackerClear(t *testing.T) {
	sick := func() *tracker {
		known := newTracker(newGate().index)
		p := seen(partition())
		p.readings[0].found(gpuUUID, finding{cause: sharing.CauseMemory, text: "memory query: UNKNOWN"})
		known.addScan(p, at(0))
		known.addEvent(receivedEvent{Event: xid(79, WholeGPU)}, at(0))
		known.addEvent(receivedEvent{Event: xid(94, 1)}, at(0))
		return known
	}
	gpu := sharing.UnitHealth{Unit: gpuUUID, GPU: gpuUUID, Index: "0", State: sharing.Unhealthy, Reason: "memory query: UNKNOWN", Explanation: "ends with the next probe that finds nothing wrong", Since: at(0).now}
	part := sharing.UnitHealth{Unit: partUUID, GPU: gpuUUID, Index: "0:0", State: sharing.Recovering, Reason: "XID 94", Explanation: "ends with the next probe that finds nothing wrong", Since: at(60).now}
	for _, test := range []struct {
		selector string
		want     []sharing.UnitHealth
	}{
		{"0", []sharing.UnitHealth{gpu, part}},
		{"0:0", []sharing.UnitHealth{part}},
		{"1", nil},
	} {
		t.Run(test.selector, func(t *testing.T) {
			selector, err := sharing.ParseSelector(test.selector)
			if err != nil {
				t.Fatal(err)
			}
			got, err := sick().clear(selector, at(60))
			if errors.Is(err, errNoUnit) != (test.want == nil) {
				t.Errorf("error %v", err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("health after that (-want +got):\n%s", diff)
			}
		})
	}
}

// TestHandleOfAnotherGPU checks that an event counts for the GPU that its handle now means, if the driver was
// asked, and else for the earlier one.
func TestHandleOfAnotherGPU(t *testing.T) {
	for _, test := range []struct{ asked, want string }{{"", gpuUUID}, {"GPU-1", "GPU-1"}} {
		known := newTracker(newGate().index)
		both := seen()
		both.readings = append(both.readings, reading{gpu: sharing.GPU{UUID: "GPU-1", Index: 1}, device: gpuHandle + 1, findings: map[string][]finding{}})
		known.addScan(both, at(0))
		if uuid, _, _, assigned := known.addEvent(receivedEvent{Event: xid(79, WholeGPU), uuid: test.asked}, at(0)); uuid != test.want || !assigned {
			t.Errorf("event with %q: of %q, assigned %t", test.asked, uuid, assigned)
		}
		for _, gpu := range known.inventory() {
			if gpu.Health.Healthy() == (gpu.UUID == test.want) {
				t.Errorf("event with %q: %s is %q", test.asked, gpu.UUID, gpu.Health.Reason)
			}
		}
	}
}

// TestHandleThatWasNotLookedUp checks that a UUID read from an event's handle does not change a released GPU's
// index, as another GPU would then be kept closed instead.
func TestHandleThatWasNotLookedUp(t *testing.T) {
	g := newGate()
	g.released[gpuUUID] = 3
	uuid := func() (any, error) { return gpuUUID, nil }
	if answer, err := g.call(Call{Method: "DeviceGetUUID", Arguments: []any{gpuHandle}}, uuid); answer != gpuUUID || err != nil || g.released[gpuUUID] != 3 {
		t.Errorf("%v, %v, at index %d", answer, err, g.released[gpuUUID])
	}
}
