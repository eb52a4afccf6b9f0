// Package kubelettest is a simulated kubelet that can be slow, hang, or refuse calls.
package kubelettest

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/virgate/virgate/internal/simkubelet"
)

// Kubelet is a simulated kubelet with faults.
type Kubelet struct {
	*simkubelet.Kubelet

	mu     sync.Mutex
	hang   bool
	refuse int
	// pending counts the Register calls that hang now, expired the hung calls whose callers waited
	// until their deadline.
	pending, expired int
	listDelay        time.Duration
}

// New returns a kubelet. Run starts it. New sets OnRegister and OnRead.
func New(options simkubelet.Options) *Kubelet {
	k := &Kubelet{}
	options.OnRegister, options.OnRead = k.register, k.read
	k.Kubelet = simkubelet.New(options)
	return k
}

// HangRegister makes the kubelet accept Register calls but never answer them.
func (k *Kubelet) HangRegister(hang bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.hang = hang
}

// Hung returns the number of Register calls that HangRegister keeps waiting now, and of those whose
// callers have waited until their deadline.
func (k *Kubelet) Hung() (pending, expired int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.pending, k.expired
}

// RefuseRegister makes the next n Register calls fail at once.
func (k *Kubelet) RefuseRegister(n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuse = n
}

// DelayLists makes the kubelet wait before it reads each list, except for the next one of each open
// stream, and before it notices the end of a stream, because one goroutine does both. A delay of 0
// turns that off.
func (k *Kubelet) DelayLists(delay time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listDelay = delay
}

// Restart is Stop and Start. Containers keep running.
func (k *Kubelet) Restart(ctx context.Context) error {
	if err := k.Stop(ctx); err != nil {
		return err
	}
	return k.Start(ctx)
}

// Reboot is Restart, but stops every container in between. Each pod therefore has to be admitted
// again with the devices that it had.
func (k *Kubelet) Reboot(ctx context.Context) error {
	if err := k.Stop(ctx); err != nil {
		return err
	}
	k.StopContainers()
	return k.Start(ctx)
}

func (k *Kubelet) register(ctx context.Context) error {
	k.mu.Lock()
	hang := k.hang
	if hang {
		k.pending++
	}
	refuse := !hang && k.refuse > 0
	if refuse {
		k.refuse--
	}
	k.mu.Unlock()
	switch {
	case hang:
		<-ctx.Done()
		k.mu.Lock()
		k.pending--
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			k.expired++
		}
		k.mu.Unlock()
		return status.Error(codes.DeadlineExceeded, "kubelet is silent")
	case refuse:
		return status.Error(codes.Unavailable, "kubelet refuses to register")
	}
	return nil
}

func (k *Kubelet) read(stopping <-chan struct{}) {
	k.mu.Lock()
	delay := k.listDelay
	k.mu.Unlock()
	if delay > 0 {
		late := time.NewTimer(delay)
		defer late.Stop()
		select {
		case <-late.C:
		case <-stopping:
		}
	}
}
