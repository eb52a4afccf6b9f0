package agent

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

// TestServesToTheLast has a part of the program take its time to end. A successor
// has to wait for it, so the kubelet is served meanwhile.
func TestServesToTheLast(t *testing.T) {
	rested := make(chan struct{})
	var end func()
	r := newRig(t, func(r *rig) {
		end = r.endable()
		r.options.Background = append(r.options.Background, func(ctx context.Context) error {
			<-ctx.Done()
			<-rested
			return nil
		})
	})
	r.shows(8)
	end()
	lost, cancel := context.WithTimeout(r.ctx, 300*time.Millisecond) // Nothing happens that could be awaited.
	defer cancel()
	if r.kubelet.Await(lost, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].StreamsClosed > 0 }) == nil {
		t.Error("the kubelet is left alone while the program ends")
	}
	for i := range 8 {
		if _, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{
			Namespace: "test", Name: fmt.Sprint("late-", i),
			Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{gpuResource: 1}}},
		}); err != nil {
			t.Errorf("a pod that comes while the program ends: %v", err)
		}
	}
	close(rested)
	r.gone()
}

// gone waits until the kubelet is not served any more.
func (r *rig) gone() {
	r.t.Helper()
	if err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool { return !k.Resources[gpuResource].Connected }); err != nil {
		r.t.Error(err)
	}
}

// TestAnswersWhileItDrains: a probe must not end a program that drains, and
// Kubernetes is told of what it does.
func TestAnswersWhileItDrains(t *testing.T) {
	probe, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := probe.Addr().String()
	_ = probe.Close()
	node, reporter := &slowNode{asked: make(chan struct{}), answer: make(chan struct{})}, newFakeReporter()
	var end func()
	r := newRig(t, func(r *rig) {
		end = r.endable()
		r.options.Listen, r.options.DrainTimeout, r.options.Reporter = address, 30*time.Second, reporter
		node.fakeNode = r.node
		r.options.Node = node
	})
	r.shows(8)
	node.slow.Store(true)
	r.agent.look()
	<-node.asked // So that it drains until it is told.
	end()
	r.awaitBody("/api/v1/status", 200, `"role": "draining"`)
	for range 10 {
		response, err := http.Get("http://" + address + "/healthz")
		if err != nil {
			t.Error(err)
			break
		}
		_ = response.Body.Close()
	}
	select {
	case <-reporter.ended:
		t.Error("the reporter has ended")
	default:
	}
	close(node.answer)
	r.gone()
}

// TestClaimedTooLate has the program end at the moment in which it may serve. It
// must not register for the time that its other parts take to end.
func TestClaimedTooLate(t *testing.T) {
	registered := make(chan bool, 1)
	var end func()
	r := newRig(t, func(r *rig) {
		end = r.endable()
		r.options.Claim = func(ctx context.Context, standBy func()) error {
			standBy()
			<-ctx.Done()
			return nil
		}
		r.options.Background = append(r.options.Background, func(ctx context.Context) error {
			<-ctx.Done()
			soon, cancel := context.WithTimeout(r.ctx, 300*time.Millisecond) // Nothing happens that could be awaited.
			defer cancel()
			registered <- r.kubelet.Await(soon, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Registrations > 0 }) == nil
			return nil
		})
	})
	r.awaitBody("/plan", 200, `"devices": 8`)
	end()
	if <-registered {
		t.Error("registered at the end")
	}
}

// TestDrainIsTheLastPlan has the program end while it decides about a profile. What
// it decides must not bring the devices back.
func TestDrainIsTheLastPlan(t *testing.T) {
	node := &slowNode{asked: make(chan struct{}), answer: make(chan struct{})}
	var end func()
	r := newRig(t, func(r *rig) {
		end = r.endable()
		r.options.DrainTimeout = 30 * time.Second
		node.fakeNode = r.node
		r.options.Node = node
	})
	r.shows(8)
	node.slow.Store(true)
	r.policy.set(profile(8), nil)
	<-node.asked
	end()
	r.awaitBody("/api/v1/status", 200, `"role": "draining"`)
	close(node.answer)
	r.gone()
	if capacity := r.kubelet.Snapshot().Resources[gpuResource].Capacity; capacity != 0 {
		t.Errorf("%d devices are left", capacity)
	}
}

// slowNode answers, when it is slow, only after it was told to, and says once that
// it was asked.
type slowNode struct {
	fakeNode
	slow          atomic.Bool
	asked, answer chan struct{}
}

func (n *slowNode) Inventory() ([]sharing.GPU, error) {
	if n.slow.CompareAndSwap(true, false) {
		close(n.asked)
		<-n.answer
	}
	return n.fakeNode.Inventory()
}
