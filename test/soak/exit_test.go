package soak

import (
	"testing"

	"github.com/virgate/virgate/internal/simnode"
)

// TestExit: a process that ends has the driver closed, however many sessions it had. A lost GPU that was reset
// is found again then.
func TestExit(t *testing.T) {
	node, err := simnode.New("t4")
	if err != nil {
		t.Fatal(err)
	}
	ended := &driverConnection{Node: node}
	if err := ended.Init(); err != nil {
		t.Fatal(err)
	}
	for _, step := range []error{node.Lose(0), node.Heal(0), ended.Init(), ended.Shutdown()} {
		if step != nil {
			t.Fatal(step)
		}
	}
	ended.exit()
	if ended.Init() == nil {
		t.Error("a process that has ended opens the driver")
	}
	next := &driverConnection{Node: node}
	if err := next.Init(); err != nil {
		t.Fatal(err)
	}
	if _, err := next.DeviceGetHandleByIndex(0); err != nil {
		t.Errorf("the next process does not find the GPU: %v", err)
	}
}
