package nvml

import (
	"testing"

	"github.com/virgate/virgate/sharing"
)

// TestLedgerForgets holds that what no pass can bring back is not kept: faults
// of partitions that are gone, and events of before a reset.
func TestLedgerForgets(t *testing.T) {
	const device = Device(1)
	gpu := sharing.GPU{UUID: "GPU-0", MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-0", GI: 1}}}
	whole := pass{readings: []reading{{gpu: gpu, device: device}}}
	xid := Event{Device: device, Type: EventXIDCritical, Data: 79, GI: 1}

	known := newLedger()
	known.enter(whole)
	if _, _, placed := known.event(xid); !placed {
		t.Fatal("the event was not placed")
	}
	gpu.Partitions = nil
	known.enter(pass{readings: []reading{{gpu: gpu, device: device}}})
	if kept := known.records["GPU-0"].events; len(kept) != 0 {
		t.Errorf("kept the faults %v of no unit", kept)
	}

	// The partition is not known now, and then the board is reset.
	for range 3 {
		if _, _, placed := known.event(xid); placed {
			t.Fatal("the event was placed")
		}
	}
	if kept := known.records["GPU-0"].unplaced; len(kept) != 1 {
		t.Errorf("kept %d times the same event", len(kept))
	}
	whole.readings[0].reset = true
	known.enter(whole)
	if got := known.inventory()[0].Partitions[0].Fault; got != "" {
		t.Errorf("fault %q of before the reset", got)
	}
}
