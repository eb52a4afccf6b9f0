package migchange

import (
	"log/slog"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// TestAfter checks that partitions which stay keep their UUID and health, each once.
func TestAfter(t *testing.T) {
	t.Parallel()
	half, whole := mig.Profile{Compute: 1, Slices: 3, MemoryGB: 40}, mig.Profile{Compute: 3, Slices: 3, MemoryGB: 40}
	at := mig.Placement{Start: 4, Size: 4}
	gpu := sharing.GPU{UUID: "GPU-a", Partitions: []sharing.Partition{
		{UUID: "MIG-a", Index: 0, Profile: half, Placement: at}, {UUID: "MIG-b", Index: 1, Profile: half, Placement: at, Health: sharing.Faulty("XID 79")},
		{UUID: "MIG-c", Index: 2, Profile: half, Placement: mig.Placement{Size: 4}},
	}}
	d := Decision{Record: &Record{}, Change: mig.Change{MIG: true, Result: []mig.Partition{{Profile: whole, Placement: mig.Placement{Size: 4}}, {Profile: half, Placement: at}, {Profile: half, Placement: at}, {Profile: half, Placement: at}}}}
	want := []sharing.Partition{
		{UUID: "GPU-a/new/0", Index: 0, Profile: whole, Placement: mig.Placement{Size: 4}},
		{UUID: "MIG-a", Index: 1, Profile: half, Placement: at}, {UUID: "MIG-b", Index: 2, Profile: half, Placement: at, Health: sharing.Faulty("XID 79")},
		{UUID: "GPU-a/new/3", Index: 3, Profile: half, Placement: at},
	}
	if diff := cmp.Diff(want, d.After(gpu).Partitions); diff != "" {
		t.Errorf("partitions (-want +got):\n%s", diff)
	}
}

// TestSituation checks that partitions on DRA count as held, and that a GPU that is being changed has no situation.
// Unused removes both pods and processes.
func TestSituation(t *testing.T) {
	t.Parallel()
	sim, err := simnode.New("h100+all-1g.10gb")
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := nvml.Scan(sim)
	if err != nil {
		t.Fatal(err)
	}
	gpu, partitioner := gpus[0], nvml.NewPartitioner(sim, nil)
	partitioner.ProcessesHidden = true
	held := []sharing.Allocation{{Namespace: "n", Pod: "p", Devices: []string{gpu.Partitions[0].UUID}}}
	r := New(Options{Partitioner: partitioner, ByDRA: func() []string { return []string{gpu.Partitions[1].UUID} }, Logger: slog.New(slog.DiscardHandler)})
	wanted := sharing.MIGConfig{Manage: true, Name: "all-balanced", WhenBusy: sharing.WaitWhenBusy}
	s, err := r.Situation(t.Context(), gpu, wanted, held)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{true, true, false} {
		if _, got := s.Holders.pods[gpu.Partitions[i].UUID]; got != want {
			t.Errorf("partition %d is held: %t", i, got)
		}
	}
	s.State = s.State.WithBusy(func(string) bool { return true })
	s.State.Busy = true
	free := s.Unused()
	if d := Decide(free); !d.Change.Complete() || d.Change.Empty() || free.State.Busy {
		t.Errorf("without users: %+v", d)
	}
	if d := Decide(s); d.Change.Complete() {
		t.Errorf("with users: %+v", d)
	}
	r.changes.underWay[gpu.UUID] = true
	if _, err := r.Situation(t.Context(), gpu, wanted, held); err == nil {
		t.Error("a GPU that is being changed has a situation")
	}
}
