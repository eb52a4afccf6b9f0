package kubelet

import (
	"bytes"
	"context"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	deviceplugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	"github.com/virgate/virgate/sharing"
)

// Invariant 10: stopping takes under a second, in every state of the kubelet,
// and leaves no goroutine and no socket behind. Without the context in
// server.register a silent kubelet holds it up, and without session.close the
// streams do.
func TestStop(t *testing.T) {
	for _, test := range []struct {
		name  string
		state func(*bench, *virgate)
		// silent says that the kubelet never answers a registration.
		silent bool
	}{
		{name: "registered", state: func(b *bench, _ *virgate) { b.shows(gpu, 32, 32) }},
		{name: "shrinking", state: func(b *bench, v *virgate) {
			b.shows(gpu, 32, 32)
			v.Apply(plan(4, profile{replicas: 2}))
			b.await(patience, func() bool { _, able, _ := b.node(gpu); return able == 8 }, "shrinking")
		}},
		{name: "renaming", state: func(b *bench, v *virgate) {
			b.shows(gpu, 32, 32)
			b.run(gpu, 1)
			v.Apply(plan(4, profile{resource: shared, replicas: 2}))
			b.await(patience, func() bool { _, able, _ := b.node(shared); return able == 6 }, "renaming")
		}},
		{name: "just dropped", state: func(b *bench, _ *virgate) {
			b.shows(gpu, 32, 32)
			b.drop(gpu)
		}},
		{name: "at once", state: func(*bench, *virgate) {}},
		{name: "registering with a silent kubelet", state: func(*bench, *virgate) {}, silent: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, topologymanager.PolicyNone)
			asked, answer := make(chan struct{}, 1), make(chan struct{})
			if test.silent {
				b.witness.slow = func(plugin deviceplugin.DevicePlugin) deviceplugin.DevicePlugin {
					asked <- struct{}{}
					<-answer
					return plugin
				}
			}
			t.Cleanup(func() { close(answer) })
			v := b.startVirgate(quick())
			v.Apply(plan(4, profile{replicas: 8}))
			test.state(b, v)
			if test.silent {
				<-asked
			}
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

// Before an uninstall, Virgate applies an empty plan and waits. What a pod holds
// stays listed, Healthy, for as long as it does; the end is an empty list, so
// that the kubelet publishes 0 while there is still a plugin. Without step.held
// the pod loses its devices.
func TestDrain(t *testing.T) {
	b := newBench(t, topologymanager.PolicyBestEffort)
	v := b.startVirgate(quick())
	v.Apply(plan(2, profile{replicas: 8}))
	b.shows(gpu, 16, 16)
	p := b.run(gpu, 2)

	nothing := sharing.Plan{Faults: plan(2, profile{replicas: 8}).Faults}
	v.Apply(nothing)
	b.shows(gpu, 2, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond) // Ten times the quiet time.
	defer cancel()
	if err := v.AwaitStopped(ctx); err == nil {
		t.Error("drained, although a pod holds devices")
	}
	b.shows(gpu, 2, 2)
	b.starts(p)
	if err := b.resize(p); err != nil {
		t.Error(err)
	}

	b.delete(p)
	ctx, cancel = context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := v.AwaitStopped(ctx); err != nil {
		t.Fatal(err)
	}
	if got := b.ledger.list(gpu); len(got) > 0 {
		t.Errorf("the last list has %v", got)
	}
	b.shows(gpu, 0, 0)
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
