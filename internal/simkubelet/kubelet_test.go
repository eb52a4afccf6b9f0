package simkubelet

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/shortdir"
)

// A stop while Allocate hangs cancels the call, and the pod is forgotten.
func TestStopDuringAllocate(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	entered := make(chan struct{})
	p.allocate = func(ctx context.Context, _ []string) (*api.AllocateResponse, error) {
		close(entered)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	failed := make(chan error, 1)
	go func() { _, err := r.AddPod(r.ctx, oneContainer("pod", 1)); failed <- err }()
	<-entered
	if err := r.Stop(r.ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; !errors.Is(err, ErrDown) {
		t.Errorf("got %v", err)
	}
	if pods := r.Snapshot().Pods; len(pods) != 0 {
		t.Errorf("got %+v", pods)
	}
}

// No goroutine of the kubelet is left after Run.
func TestRunLeavesNoGoroutine(t *testing.T) {
	dir := shortdir.New(t)
	limited, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ctx, stop := context.WithCancel(limited)
	defer stop()
	r := &rig{Kubelet: New(Options{Dir: dir, AllowOverlap: true}), t: t, ctx: limited}
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.await(func(s Snapshot) bool { return s.Up })
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	if err := p.register(ctx); err != nil { // the first connection leaks, as in the real kubelet
		t.Fatal(err)
	}
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Streams == 2 })
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	// A goroutine that was waited for may not have ended completely.
	await.Until(t, "the end of the kubelet's goroutines", func() error {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		for goroutine := range strings.SplitSeq(string(stacks), "\n\n") {
			if strings.Contains(goroutine, "simkubelet.(*Kubelet)") {
				return errors.New(goroutine)
			}
		}
		return nil
	})
	if err := r.Start(t.Context()); !errors.Is(err, errEnded) {
		t.Errorf("Start after Run: %v", err)
	}
}

func TestRunUnderEndedContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := New(Options{Dir: t.TempDir()}).Run(ctx); err != nil {
		t.Error(err)
	}
}
