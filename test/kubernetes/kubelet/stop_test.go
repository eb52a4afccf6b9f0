package kubelet

import (
	"bytes"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// Invariant 10: stopping takes under a second, in every state of the kubelet,
// and leaves no goroutine and no socket behind. Without the case for stopping
// in service.await the streams, and with them the servers, would wait for the
// kubelet.
func TestStop(t *testing.T) {
	for _, test := range []struct {
		name  string
		state func(*bench, *virgate)
	}{
		{"registered", func(b *bench, _ *virgate) { b.shows(gpu, 32, 32) }},
		{"shrinking", func(b *bench, v *virgate) {
			b.shows(gpu, 32, 32)
			v.Apply(plan(4, profile{replicas: 2}))
			b.await(patience, func() bool { _, able, _ := b.node(gpu); return able == 8 }, "shrinking")
		}},
		{"renaming", func(b *bench, v *virgate) {
			b.shows(gpu, 32, 32)
			b.run(gpu, 1)
			v.Apply(plan(4, profile{resource: shared, replicas: 2}))
			b.await(patience, func() bool { _, able, _ := b.node(shared); return able == 6 }, "renaming")
		}},
		{"just dropped", func(b *bench, _ *virgate) {
			b.shows(gpu, 32, 32)
			b.drop(gpu)
		}},
		{"at once", func(*bench, *virgate) {}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, topologymanager.PolicyNone)
			v := b.startVirgate(quick())
			v.Apply(plan(4, profile{replicas: 8}))
			test.state(b, v)
			if took := v.stop(t); took > time.Second {
				t.Errorf("took %s", took)
			}
			if left := virgateGoroutines(); left != "" {
				t.Errorf("left behind: %s", left)
			}
			if left, err := filepath.Glob(filepath.Join(b.dir, "virgate-*.sock")); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
			b.await(time.Second, func() bool { _, able, _ := b.node(gpu); return able == 0 }, "the kubelet to notice")
		})
	}
}

// virgateGoroutines returns the stacks of goroutines in the plugin package.
func virgateGoroutines() string {
	stacks := make([]byte, 4<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	var left []byte
	for stack := range bytes.SplitSeq(stacks, []byte("\n\n")) {
		if bytes.Contains(stack, []byte("virgate/virgate/plugin.")) {
			left = append(append(left, stack...), '\n')
		}
	}
	return string(left)
}
