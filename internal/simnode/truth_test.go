package simnode_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/virgate/virgate/internal/simnode"
)

func TestBoards(t *testing.T) {
	n, err := simnode.New("a30x4+all-2g.12gb")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Init(); err != nil {
		t.Fatal(err)
	}
	before := n.Boards()
	if err := n.Lose(0); err != nil {
		t.Fatal(err)
	}
	if err := n.Remove(1); err != nil {
		t.Fatal(err)
	}
	// The board after it has moved up.
	if err := n.DestroyComputeInstance(1, 1, 0); err != nil {
		t.Fatal(err)
	}
	want := n.Boards()
	copy(want, before)
	want[0].Lost = true
	want[1].Index = -1
	want[2].Index, want[2].Partitions = 1, before[2].Partitions[1:]
	want[3].Index = 2
	if diff := cmp.Diff(want, n.Boards()); diff != "" {
		t.Error(diff)
	}
	first := simnode.Board{Name: "NVIDIA A30", MIG: true, Partitions: []simnode.Partition{
		{Profile: "2g.12gb", GPUInstance: 1}, {Profile: "2g.12gb", GPUInstance: 2},
	}}
	uuids := cmpopts.IgnoreFields(simnode.Partition{}, "UUID")
	if diff := cmp.Diff(first, before[0], uuids, cmpopts.IgnoreFields(simnode.Board{}, "UUID")); diff != "" {
		t.Error(diff)
	}
}
