package agent

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
)

// TestServesToTheLast has a part of the program take its time to end. A successor
// has to wait for it, so the kubelet is served meanwhile.
func TestServesToTheLast(t *testing.T) {
	stop, rested := make(chan struct{}), make(chan struct{})
	r := newRig(t, func(r *rig) {
		r.options.Background = append(r.options.Background,
			func(context.Context) error {
				<-stop
				return errors.New("told to stop")
			},
			func(ctx context.Context) error {
				<-ctx.Done()
				<-rested
				return nil
			},
		)
		r.wantErr = "told to stop"
	})
	r.shows(8)
	close(stop)
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
	if err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool { return !k.Resources[gpuResource].Connected }); err != nil {
		t.Error(err)
	}
}
