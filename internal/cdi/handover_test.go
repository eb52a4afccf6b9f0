package cdi

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

// TestTwoWriters has one Virgate write while another still does, each for boards
// that the other does not have, and a runtime that reads all the while: it finds
// a whole file each time, with what a pod holds in it. In the end both know what
// is in the file.
func TestTwoWriters(t *testing.T) {
	old := newBench(t)
	old.holders = []string{"MIG-held"}
	old.names(boards(1, "MIG-held"))
	next := newBench(t)
	next.holders = old.holders
	next.restart(old.options.Dir)

	var ended atomic.Bool
	var runtime, writers sync.WaitGroup
	reads := 0
	runtime.Go(func() {
		for last := false; !last; reads++ {
			last = ended.Load()
			spec, err := cdilib.ReadSpec(old.path(), 0)
			if err != nil || spec.GetDevice("MIG-held") == nil || len(spec.ContainerEdits.DeviceNodes) != 4 {
				t.Errorf("a runtime reads %v, %v", spec, err)
				return
			}
		}
	})
	for first, b := range []*bench{old, next} {
		writers.Go(func() {
			for i := range 40 {
				if _, err := b.Write(t.Context(), boards(2+(first+i)%3, "MIG-more"), nil); err != nil {
					t.Errorf("Virgate %d: %v", first, err)
					return
				}
			}
		})
	}
	writers.Wait()
	ended.Store(true)
	runtime.Wait()
	// A moment later each sees that the other has written.
	for range 2 {
		for _, b := range []*bench{old, next} {
			if names := b.names(boards(4)); !slices.Contains(names, "gpu=MIG-held") {
				t.Errorf("entries %v", names)
			}
		}
	}
	old.wants([]string{"k8s.device-plugin.nvidia.com-gpu.json"}, old.files())
}

// TestSuccessorKeepsWhatPodsHold has another Virgate begin while the first one
// still runs and has just lost a unit, whose time begins anew with it.
func TestSuccessorKeepsWhatPodsHold(t *testing.T) {
	old := newBench(t)
	old.holders = []string{"MIG-a"}
	old.names(boards(1, "MIG-a"))
	old.names(boards(1, "MIG-b"))
	next := newBench(t)
	next.holders = old.holders
	next.restart(old.options.Dir)
	both := []string{"gpu=0:0", "gpu=MIG-a", "gpu=MIG-b"}
	for _, b := range []*bench{next, old} {
		b.now = b.now.AddDate(0, 0, 1)
		b.wants(both, b.names(boards(1, "MIG-b")))
	}
	// The pod ends; whoever sees it first takes the entry out, and it stays out.
	old.holders, next.holders = nil, nil
	for _, b := range []*bench{next, old, next} {
		b.now = b.now.AddDate(0, 0, 1)
		b.wants([]string{"gpu=0:0", "gpu=MIG-b"}, b.names(boards(1, "MIG-b")))
	}
}
