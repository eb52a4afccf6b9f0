package simdra

import (
	"errors"
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

type capacities = map[resourceapi.QualifiedName]resource.Quantity

// TestAllocate allocates claims one after another: of a shared device, of two that exclude each other, and of one
// with a taint.
func TestAllocate(t *testing.T) {
	api, err := NewAPI(t.Context(), "driver", "node", t.Errorf)
	if err != nil {
		t.Fatal(err)
	}
	text := func(value string) resourceapi.DeviceAttribute {
		return resourceapi.DeviceAttribute{StringValue: &value}
	}
	one := map[string]resourceapi.Counter{"units": {Value: resource.MustParse("1")}}
	shared := resourceapi.Device{Name: "shared", AllowMultipleAllocations: new(true), Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		"shares": {Value: resource.MustParse("3"), RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: new(resource.MustParse("1"))}},
		"memory": {Value: resource.MustParse("8Gi"), RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: new(resource.MustParse("0"))}},
	}}
	small := func(name string, taints ...resourceapi.DeviceTaint) resourceapi.Device {
		return resourceapi.Device{
			Name: name, Taints: taints, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"profile": text("1g.10gb"), "resource": text("small")},
			Capacity:         map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("10Gi")}},
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu", Counters: one}},
		}
	}
	slice := func(name string, generation, count int64, spec resourceapi.ResourceSliceSpec) {
		spec.Pool = resourceapi.ResourcePool{Name: "pool", Generation: generation, ResourceSliceCount: count}
		var s resourceapi.ResourceSlice
		s.Name, s.Spec = name, spec
		api.Do(func() { api.Store(s) })
	}
	expect := func(name string, request Request, want ...string) {
		t.Helper()
		claim, err := api.Allocate(name, request)
		var got []string
		if err == nil {
			for _, r := range claim.Status.Allocation.Devices.Results {
				got = append(got, r.Device)
			}
		} else if !errors.Is(err, ErrUnschedulable) {
			t.Fatal(err)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("claim %s got %v, want %v", name, got, want)
		}
	}
	expect("without slices", Request{})
	slice("old", 1, 1, resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{{Name: "old"}}})
	slice("0", 2, 3, resourceapi.ResourceSliceSpec{SharedCounters: []resourceapi.CounterSet{{Name: "gpu", Counters: one}}})
	slice("1", 2, 3, resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{shared}})
	expect("incomplete", Request{})
	slice("2", 2, 3, resourceapi.ResourceSliceSpec{Devices: []resourceapi.Device{small("ill", resourceapi.DeviceTaint{Key: "fault"}), small("a"), small("b")}})

	expect("first share", Request{}, "shared")
	expect("two shares and memory", Request{Capacity: capacities{"shares": resource.MustParse("2"), "memory": resource.MustParse("6Gi")}}, "shared")
	expect("too large", Request{Profile: "1g.10gb", Capacity: capacities{"memory": resource.MustParse("11Gi")}})
	expect("of another name", Request{Resource: "large"})
	expect("two that exclude each other", Request{Resource: "small", Count: 2})
	expect("a small one", Request{Resource: "small"}, "a")
	expect("the other one", Request{})
	api.Release(api.Claims["default/a small one"])
	api.Release(api.Claims["default/two shares and memory"])
	expect("more memory", Request{Capacity: capacities{"memory": resource.MustParse("8Gi")}}, "shared")
	expect("no memory left", Request{Capacity: capacities{"memory": resource.MustParse("1Gi")}}, "a")
	expect("a share without memory", Request{}, "shared")
}
