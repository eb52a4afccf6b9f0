package e2e

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// tenants follows which pod holds what, as the kubelet has it, and complains to the
// diary when a pod loses a device, or has one for itself that it has not.
type tenants struct {
	kubelet api.PodResourcesListerClient
	diary   *diary
	// units are the node's GPUs in the order of the layouts.
	units []string

	mu   sync.Mutex
	held map[string][]holding
}

// followTenants follows until the end of the test.
func followTenants(t *testing.T, kubelet api.PodResourcesListerClient, d *diary, units []string) *tenants {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &tenants{kubelet: kubelet, diary: d, units: units}
	var following sync.WaitGroup
	following.Go(func() { f.run(ctx) })
	t.Cleanup(func() { cancel(); following.Wait() })
	return f
}

func (f *tenants) run(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		held, err := holdings(ctx, f.kubelet)
		var devices map[string][]holding
		if err == nil {
			devices, err = healthy(ctx, f.kubelet)
		}
		if err != nil {
			f.complain(ctx, "the kubelet does not say who holds what: %v", err)
			continue
		}
		f.compare(ctx, held)
		f.alone(ctx, held)
		f.backed(ctx, held, devices)
		f.diary.takeTruth(devices)
		f.mu.Lock()
		f.held = held
		f.mu.Unlock()
	}
}

func (f *tenants) complain(ctx context.Context, format string, arguments ...any) {
	if ctx.Err() == nil {
		f.diary.complain(format, arguments...)
	}
}

// compare says that who ran and is not being deleted holds what it held.
func (f *tenants) compare(ctx context.Context, held map[string][]holding) {
	for name, before := range f.now() {
		if difference := cmp.Diff(before, held[name], cmp.AllowUnexported(holding{}, way{})); difference != "" && f.diary.runs(name) {
			f.complain(ctx, "pod %s has other devices (-before +after):\n%s", name, difference)
		}
	}
}

// alone says that a whole GPU has one tenant.
func (f *tenants) alone(ctx context.Context, held map[string][]holding) {
	whole, pods := map[string]bool{}, map[string][]string{}
	for name, devices := range held {
		for _, device := range devices {
			whole[device.unit] = whole[device.unit] || !device.shared
			pods[device.unit] = append(pods[device.unit], name)
		}
	}
	for unit := range whole {
		if whole[unit] && len(pods[unit]) > 1 {
			slices.Sort(pods[unit])
			f.complain(ctx, "%s is whole one's of the pods %q", unit, pods[unit])
		}
	}
}

// backed says that what a running pod holds is healthy.
func (f *tenants) backed(ctx context.Context, held, devices map[string][]holding) {
	for name, each := range held {
		for _, device := range each {
			if !slices.Contains(devices[device.resource], device) && f.diary.runs(name) {
				f.complain(ctx, "pod %s holds %s, which the kubelet has not as healthy", name, device.id)
			}
		}
	}
}

func (f *tenants) now() map[string][]holding {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.held
}

// counts are how many devices of each GPU are held in each way.
func (f *tenants) counts() map[way][8]int {
	counts := map[way][8]int{}
	for _, devices := range f.now() {
		for _, device := range devices {
			of := counts[device.way]
			of[slices.Index(f.units, device.unit)]++
			counts[device.way] = of
		}
	}
	return counts
}
