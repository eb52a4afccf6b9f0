package nodestatus

import (
	"context"
	"maps"
	"net/http"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

func (f *fakeAPI) reporterOfTest(t *testing.T) *Reporter {
	t.Helper()
	r, err := New(Options{Config: f.config(), Node: nodeName, Condition: true})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestAnnounceWrites has both numbers written in one request, beside those that are there.
func TestAnnounceWrites(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	r := f.reporterOfTest(t)
	counts := func(gpus, shares int) map[string]int {
		return map[string]int{"nvidia.com/gpu": gpus, "nvidia.com/gpu.shared": shares}
	}
	if written := r.Announce(t.Context(), counts(8, 10000), counts(4, 9999)); !written["nvidia.com/gpu"] || !written["nvidia.com/gpu.shared"] {
		t.Errorf("written %v", written)
	}
	got := map[string]string{}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	for list, quantities := range map[string]corev1.ResourceList{"capacity": f.node.Status.Capacity, "allocatable": f.node.Status.Allocatable} {
		for name, quantity := range quantities {
			got[list+" "+string(name)] = quantity.String()
		}
	}
	want := map[string]string{
		"capacity nvidia.com/gpu": "8", "capacity nvidia.com/gpu.shared": "10k",
		"allocatable nvidia.com/gpu": "4", "allocatable nvidia.com/gpu.shared": "9999",
	}
	if !maps.Equal(got, want) || len(f.requests) != 1 {
		t.Errorf("the node has %v by %v, want %v", got, f.requests, want)
	}
	if got := r.Announcements(); got["written"] != 2 {
		t.Errorf("%v", got)
	}
}

// TestAnnounceRefused checks that a refused resource is not tried again and again, while a failure is.
func TestAnnounceRefused(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	r := f.reporterOfTest(t)
	announce := func() bool {
		return r.Announce(t.Context(), map[string]int{"nvidia.com/gpu": 8}, map[string]int{"nvidia.com/gpu": 8})["nvidia.com/gpu"]
	}
	answer := func(status int) {
		f.mutex.Lock()
		defer f.mutex.Unlock()
		f.refuse = map[string]int{"/status": status}
	}
	answer(http.StatusConflict)
	if announce() {
		t.Error("a conflict counts as written")
	}
	answer(http.StatusForbidden)
	for range 3 {
		if announce() {
			t.Error("a refusal counts as written")
		}
	}
	if f.mutex.Lock(); len(f.requests) != 2 {
		t.Errorf("requests %v", f.requests)
	}
	f.mutex.Unlock()
	if got := r.Announcements(); !maps.Equal(got, map[string]uint64{"written": 0, "refused": 1, "failed": 1}) {
		t.Errorf("%v", got)
	}
	answer(0)
	r.announcer.refused["nvidia.com/gpu"] = time.Now().Add(-time.Second)
	if !announce() {
		t.Error("not tried again after a while")
	}
}

// TestAnnounceEndsInTime checks that a hanging API server takes only the caller's time.
func TestAnnounceEndsInTime(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	f.hang = true
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if f.reporterOfTest(t).Announce(ctx, map[string]int{"nvidia.com/gpu": 8}, map[string]int{"nvidia.com/gpu": 8})["nvidia.com/gpu"] {
		t.Error("it counts as written")
	}
}
