package podresources

import (
	"context"
	"sync"
	"testing"

	"github.com/virgate/virgate/internal/simkubelet"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func TestServing(t *testing.T) {
	n := startNode(t, simkubelet.Options{})
	source := n.source(nil)
	is := func(when, resource string, want bool) {
		t.Helper()
		if got, err := source.Serving(n.ctx, resource); got != want || err != nil {
			t.Errorf("%s, %s: %t, %v", when, resource, got, err)
		}
	}
	is("without a plugin", gpu, false)
	stop := n.offer("a.sock", devices("0", "!1")...)
	is("with a plugin", gpu, true)
	is("with another one's plugin", "nvidia.com/other", false)
	stop()
	n.await(func(s simkubelet.Snapshot) bool { return !s.Resources[gpu].Connected })
	is("when the plugin has gone", gpu, false)
	n.offer("b.sock", devices("!0")...)
	is("with a plugin that has nothing healthy", gpu, false)
}

// GetAllocatableResources shows no device, and waits to be told so where it has
// somebody to tell that it was called.
func (s *scripted) GetAllocatableResources(context.Context, *api.AllocatableResourcesRequest) (*api.AllocatableResourcesResponse, error) {
	s.calls.Add(1)
	if s.called != nil {
		close(s.called)
		<-s.answer
	}
	return &api.AllocatableResourcesResponse{}, nil
}

// TestServingIsAskedForAllAtOnce has many resources register at once, as at a
// start: one call each would take its turn for seconds.
func TestServingIsAskedForAllAtOnce(t *testing.T) {
	service, source := serve(t, patient, nil)
	var asking sync.WaitGroup
	for range 10 * crowd {
		asking.Go(func() {
			if _, err := source.Serving(t.Context(), gpu); err != nil {
				t.Error(err)
			}
		})
	}
	asking.Wait()
	if calls := service.calls.Load(); calls > crowd {
		t.Errorf("%d calls", calls)
	}
}

// TestServingBegins holds that nobody joins a call that the kubelet may have
// answered already.
func TestServingBegins(t *testing.T) {
	service, source := serve(t, patient, nil)
	service.called, service.answer = make(chan struct{}), make(chan struct{})
	ended := make(chan error)
	go func() {
		_, err := source.Serving(t.Context(), gpu)
		ended <- err
	}()
	<-service.called
	if _, first := source.allocatables.join(); !first {
		t.Error("a call that is under way can be joined")
	}
	close(service.answer)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
