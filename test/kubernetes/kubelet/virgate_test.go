package kubelet

import (
	"context"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/plugin"
)

// virgate is a running Virgate without the part that plans: the test plans.
type virgate struct {
	*plugin.Manager
	source *podresources.Source
	cancel context.CancelFunc
	ended  chan struct{}
}

// startVirgate starts one that stands by while another serves, and takes over
// its state, as the program does.
func (b *bench) startVirgate(timing plugin.Timing) *virgate {
	b.t.Helper()
	return b.startVirgateThatReads(b.podResources, timing)
}

// startVirgateThatReads starts one that reads this socket beside the kubelet's
// checkpoint; none when empty.
func (b *bench) startVirgateThatReads(socket string, timing plugin.Timing) *virgate {
	b.t.Helper()
	file := state.NewFile(b.dir, b.log)
	source := podresources.New(podresources.Options{Socket: socket, CheckpointDir: b.dir, Logger: b.log})
	ctx, cancel := context.WithCancel(context.Background())
	v := &virgate{source: source, cancel: cancel, ended: make(chan struct{})}
	v.Manager = plugin.NewManager(plugin.Options{
		Dir: b.dir, Kubelet: source, Store: state.Lists{File: file}, Timing: timing, Logger: b.log,
	})
	go func() {
		defer close(v.ended)
		lock, err := state.Acquire(ctx, b.dir, func(error) {})
		if err != nil {
			return
		}
		file.Load()
		_ = v.Run(ctx)
		_ = lock.Release()
	}()
	b.t.Cleanup(func() { v.stop(b.t) })
	return v
}

// stop ends it and returns how long that took. Stopping again does nothing.
func (v *virgate) stop(t *testing.T) time.Duration {
	t.Helper()
	began := time.Now()
	v.cancel()
	<-v.ended
	took := time.Since(began)
	if err := v.source.Close(); err != nil {
		t.Error(err)
	}
	return took
}

// halt stops Virgate and waits until the kubelet has noticed, for each of the
// resources.
func (b *bench) halt(v *virgate, resources ...string) {
	b.t.Helper()
	losses := map[string]int{}
	for _, resource := range resources {
		losses[resource] = b.ledger.tally(resource).losses
	}
	v.stop(b.t)
	for _, resource := range resources {
		b.await(time.Second, func() bool {
			_, allocatable, _ := b.node(resource)
			return b.ledger.tally(resource).losses > losses[resource] && allocatable == 0
		}, "the kubelet to let go of %s", resource)
	}
}
