package plugin_test

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// holding is a kubelet whose pods, in the namespace, hold all of four devices.
type holding struct {
	namespace string
	looks     atomic.Int64
}

func (h *holding) Held(context.Context) ([]sharing.Allocation, error) {
	h.looks.Add(1)
	return []sharing.Allocation{{
		Namespace: h.namespace, Pod: "p", Container: "c", Resource: gpu,
		Devices: []string{"GPU-0000::0", "GPU-0000::1", "GPU-0000::2", "GPU-0000::3"},
	}}, nil
}
func (*holding) Applied(context.Context) (map[string][]string, error) { return nil, nil }
func (*holding) Serving(context.Context, string) (bool, error)        { return false, nil }

// TestReminders holds that a list is sent again, once in each quiet time, while
// somebody waits for a holder that the kubelet does not name: it may be gone.
func TestReminders(t *testing.T) {
	const quiet = 200 * time.Millisecond
	for _, row := range []struct {
		name, namespace string
		devices         int // that the plan wants
		awaited         []string
		reminds         bool
	}{
		{"devices are surplus", "", 2, nil, true},
		{"devices are surplus, and their pod is named", "test", 2, nil, false},
		{"the unit is awaited", "", 4, []string{"GPU-0001", "GPU-0000"}, true},
		{"another unit is awaited", "", 4, []string{"GPU-0001"}, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			kubelet := &holding{namespace: row.namespace}
			client, manager := dialOptions(t, plugin.Options{
				Logger: slog.New(slog.DiscardHandler), Kubelet: kubelet,
				Timing: plugin.Timing{Quiet: quiet, ListInterval: time.Millisecond, VerifyAfter: time.Hour},
			}, plan(gpu, 1, 4))
			next, _ := listen(t, client)
			next()
			began := time.Now()
			manager.Apply(plan(gpu, 1, row.devices))
			var waiting sync.WaitGroup
			defer waiting.Wait()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			waiting.Go(func() {
				tick := time.NewTicker(5 * time.Millisecond)
				defer tick.Stop()
				for ctx.Err() == nil {
					manager.Remind(row.awaited...)
					<-tick.C
				}
			})
			if !row.reminds {
				for seen := kubelet.looks.Load(); kubelet.looks.Load() < seen+10; {
					runtime.Gosched()
				}
				if lists := manager.Status().Resources[0].Lists; lists != 1 {
					t.Errorf("sent %d times", lists)
				}
				return
			}
			for range 3 {
				if got, want := next(), "0 1 2 3"; got != want {
					t.Errorf("list %q, want %q", got, want)
				}
			}
			if took := time.Since(began); took < 2*quiet {
				t.Errorf("sent three times in %s", took)
			}
		})
	}
}
