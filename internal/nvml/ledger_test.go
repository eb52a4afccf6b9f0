package nvml

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

const (
	boardHandle = Device(1)
	boardUUID   = "GPU-0"
	partUUID    = "MIG-0"
)

func at(seconds int) moment {
	return moment{now: time.Unix(0, 0).Add(time.Duration(seconds) * time.Second), rules: sharing.DefaultHealthRules()}
}

// seen is a full pass over one board, with its partition or without.
func seen(partitions ...sharing.Partition) pass {
	gpu := sharing.GPU{UUID: boardUUID, MIG: true, Partitions: partitions}
	return pass{full: true, readings: []reading{{gpu: gpu, device: boardHandle, vitals: vitals{findings: map[string][]finding{}}}}}
}

func partition() sharing.Partition { return sharing.Partition{UUID: partUUID, GI: 1} }

func xid(code uint64, gi uint32) Event {
	return Event{Device: boardHandle, Type: EventXIDCritical, Data: code, GI: gi}
}

// TestLedgerForgets holds that what no pass can bring back is not kept: faults
// of partitions that are gone, and events of before a reset.
func TestLedgerForgets(t *testing.T) {
	known := newLedger()
	known.enter(seen(partition()), at(0))
	if _, _, _, placed := known.event(xid(79, 1), at(0)); !placed {
		t.Fatal("the event was not placed")
	}
	known.enter(seen(), at(10))
	if _, kept := known.records[boardUUID].units[partUUID]; kept {
		t.Error("kept the health of no unit")
	}

	// The partition is not known now, and then the board is reset.
	for range 3 {
		if _, _, _, placed := known.event(xid(79, 1), at(10)); placed {
			t.Fatal("the event was placed")
		}
	}
	if kept := known.records[boardUUID].unplaced; len(kept) != 1 {
		t.Errorf("kept %d times the same event", len(kept))
	}
	reset := seen(partition())
	reset.readings[0].reset = true
	known.enter(reset, at(20))
	if got := known.inventory()[0].Partitions[0].Fault; got != "" {
		t.Errorf("fault %q of before the reset", got)
	}
}

// TestLedgerEvidence holds what counts as evidence that a board was reset, and
// what does not.
func TestLedgerEvidence(t *testing.T) {
	absent := func() pass { return pass{full: true} }
	unread := func(why finding) pass {
		return pass{full: true, unreadable: map[string]finding{boardUUID: why}}
	}
	with := func(driver string) pass {
		p := seen()
		p.driver = driver
		return p
	}
	tests := []struct {
		name string
		then []func(*ledger)
		want sharing.HealthState
	}{
		{"nothing", nil, sharing.Unhealthy},
		{"it was not listed", []func(*ledger){func(l *ledger) { l.enter(absent(), at(10)) }}, sharing.Recovering},
		{"it was lost", []func(*ledger){func(l *ledger) { l.enter(unread(lost()), at(10)) }}, sharing.Recovering},
		{"it could not be read", []func(*ledger){func(l *ledger) { l.enter(unread(unreadable(Unknown)), at(10)) }}, sharing.Unhealthy},
		{"it was lost, and then could not be read", []func(*ledger){
			func(l *ledger) { l.enter(unread(lost()), at(10)) }, func(l *ledger) { l.enter(unread(unreadable(Unknown)), at(20)) },
		}, sharing.Recovering},
		{"it may be what could not be read", []func(*ledger){func(l *ledger) { l.enter(pass{full: true, obscure: true}, at(10)) }}, sharing.Unhealthy},
		{"it was read late, after another driver came", []func(*ledger){
			func(l *ledger) { l.enter(with("1"), at(10)) }, func(l *ledger) { l.enter(pass{driver: "2"}, at(20)) },
		}, sharing.Recovering},
		{"it has not answered yet", []func(*ledger){func(l *ledger) {
			l.enter(pass{full: true, pending: map[string]bool{boardUUID: true}}, at(10))
		}}, sharing.Unhealthy},
		{"another board was late", []func(*ledger){func(l *ledger) { l.enter(pass{}, at(10)) }}, sharing.Unhealthy},
		{"no driver was loaded", []func(*ledger){func(l *ledger) { l.fail(&Error{Call: "Init", Return: DriverNotLoaded}) }}, sharing.Recovering},
		{"the driver hiccuped", []func(*ledger){func(l *ledger) { l.fail(&Error{Call: "Init", Return: Uninitialized}) }}, sharing.Unhealthy},
		{"another driver", []func(*ledger){func(l *ledger) { l.enter(with("1"), at(10)) }, func(l *ledger) { l.enter(with("2"), at(20)) }}, sharing.Recovering},
		{"the same driver", []func(*ledger){func(l *ledger) { l.enter(with("1"), at(10)) }, func(l *ledger) { l.enter(with("1"), at(20)) }}, sharing.Unhealthy},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			known := newLedger()
			known.enter(seen(), at(0))
			known.event(xid(79, WholeBoard), at(0))
			for _, step := range test.then {
				step(known)
			}
			if test.name != "another driver" && test.name != "the same driver" {
				known.enter(seen(), at(30))
			}
			if got := known.records[boardUUID].units[boardUUID].state; got != test.want {
				t.Errorf("state %s, want %s", got, test.want)
			}
		})
	}
}

// TestLedgerLate holds that one look which came late, and could not tell which board
// it was of, says nothing against those that it did not find.
func TestLedgerLate(t *testing.T) {
	known := newLedger()
	known.enter(seen(), at(0))
	known.enter(pass{obscure: true}, at(10))
	if got := known.inventory()[0].Fault; got != "" {
		t.Errorf("fault %q", got)
	}
}

// TestLedgerClear holds that a board's word is its partitions' too, a
// partition's its own, and that what a probe finds stays.
func TestLedgerClear(t *testing.T) {
	sick := func() *ledger {
		known := newLedger()
		p := seen(partition())
		p.readings[0].found(boardUUID, finding{sharing.CauseMemory, "memory query: UNKNOWN"})
		known.enter(p, at(0))
		known.event(xid(79, WholeBoard), at(0))
		known.event(xid(95, 1), at(0))
		return known
	}
	board := sharing.UnitHealth{Unit: boardUUID, GPU: boardUUID, Index: "0", State: sharing.Unhealthy, Reason: "memory query: UNKNOWN", Since: at(0).now}
	part := sharing.UnitHealth{Unit: partUUID, GPU: boardUUID, Index: "0:0", State: sharing.Recovering, Reason: "XID 95", Since: at(60).now}
	for _, test := range []struct {
		selector string
		want     []sharing.UnitHealth
	}{
		{"0", []sharing.UnitHealth{board, part}},
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
