package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

const nodeName = "worker-1"

// features are those of the scheduler's allocator with the default gates of 1.36
// (pkg/features/kube_features.go, dynamicresources.AllocatorFeatures).
var features = structured.Features{
	AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true,
}

// node is a simulated node as dra.Build takes it. Its GPUs are divided on demand where the profile asks for
// it.
func node(t testing.TB, name string, profile sharing.Profile) dra.Node {
	t.Helper()
	library, err := simnode.New(name)
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := nvml.Scan(library)
	if err != nil {
		t.Fatal(err)
	}
	n := dra.Node{Name: nodeName, Driver: dra.DriverName, GPUs: gpus, Profile: profile, DriverVersion: "580.65.06", CUDA: 13000, OnDemand: map[string]mig.Geometry{}}
	n.Plan = sharing.NewPlan(gpus, profile)
	for _, gpu := range gpus {
		state, err := nvml.NewPartitioner(library, nil).State(t.Context(), gpu.UUID)
		if err != nil {
			t.Fatal(err)
		}
		if yes, _ := dra.OnDemand(gpu, state, profile); yes {
			n.OnDemand[gpu.UUID] = state.Geometry
		}
	}
	return n
}

// everything offers all resources by DRA, and divides GPUs on demand if dynamic is true.
func everything(dynamic bool, entries ...sharing.ReplicatedResource) sharing.Profile {
	return sharing.Profile{
		MIGStrategy: sharing.MIGMixed, Policy: sharing.Packed, GPUNames: []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
		TimeSlicing: entries, MIG: sharing.MIGConfig{Manage: true}, DRA: sharing.DRAConfig{All: true, DynamicMIG: dynamic},
	}
}

// shared is a time-slicing entry.
func shared(name string, replicas int, rename string) sharing.ReplicatedResource {
	return sharing.ReplicatedResource{Resource: name, Replicas: replicas, Rename: rename}
}

// cluster is what the allocator sees: the slices and classes, and the claims' allocations.
type cluster struct {
	t       testing.TB
	slices  []*resourceapi.ResourceSlice
	classes classes
	// allocated are the results by claim; the test chooses the claims' names.
	allocated   map[string][]resourceapi.DeviceRequestAllocationResult
	expressions *cel.Cache
}

type classes map[string]*resourceapi.DeviceClass

func (c classes) List() (all []*resourceapi.DeviceClass, err error) {
	for _, class := range c {
		all = append(all, class)
	}
	return all, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, ok := c[name]; ok {
		return class, nil
	}
	return nil, errors.New("no class " + name)
}

func newCluster(t testing.TB, n dra.Node) *cluster {
	t.Helper()
	c := &cluster{
		t: t, allocated: map[string][]resourceapi.DeviceRequestAllocationResult{},
		expressions: cel.NewCache(100, cel.Features{EnableConsumableCapacity: true}),
	}
	c.publish(n)
	return c
}

// publish replaces the node's offer by a new one that takes account of what is held.
func (c *cluster) publish(n dra.Node) {
	c.t.Helper()
	n.Held = c.held()
	offer, err := dra.Build(n)
	if err != nil {
		c.t.Fatal(err)
	}
	c.slices, c.classes = nil, classes{"any": {ObjectMeta: metav1.ObjectMeta{Name: "any"}}}
	for i := range offer.Slices {
		c.slices = append(c.slices, &offer.Slices[i])
	}
	for i := range offer.Classes {
		c.classes[*offer.Classes[i].Spec.ExtendedResourceName] = &offer.Classes[i]
	}
	// Another driver's slice must not matter to expressions about our attributes.
	c.slices = append(c.slices, &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "0-other"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: "a.example.com", NodeName: new(nodeName), Pool: resourceapi.ResourcePool{Name: nodeName, ResourceSliceCount: 1}, Devices: []resourceapi.Device{{Name: "other"}},
	}})
}

func (c *cluster) held() (names []string) {
	for _, results := range c.allocated {
		for _, result := range results {
			names = append(names, result.Device)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// request asks for one device of the class.
func request(name, class string, selectors ...string) resourceapi.DeviceRequest {
	r := resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}}
	for _, expression := range selectors {
		r.Exactly.Selectors = append(r.Exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}})
	}
	return r
}

func capacity(name, amount string) *resourceapi.CapacityRequirements {
	return &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{resourceapi.QualifiedName(name): resource.MustParse(amount)}}
}

// allocate allocates devices to the claim and returns their names, or nil if there are none.
func (c *cluster) allocate(claim string, devices resourceapi.DeviceClaim) []string {
	c.t.Helper()
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, results := range c.allocated {
		for _, r := range results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			if r.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
	allocator, err := structured.NewAllocator(context.Background(), features, state, c.classes, c.slices, c.expressions)
	if err != nil {
		c.t.Fatal(err)
	}
	results, err := allocator.Allocate(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}},
		[]*resourceapi.ResourceClaim{{ObjectMeta: metav1.ObjectMeta{Name: claim, UID: types.UID(claim)}, Spec: resourceapi.ResourceClaimSpec{Devices: devices}}})
	if err != nil {
		c.t.Fatal(err)
	}
	if len(results) == 0 {
		return nil
	}
	c.allocated[claim] = results[0].Devices.Results
	var names []string
	for _, r := range results[0].Devices.Results {
		names = append(names, r.Device)
	}
	return names
}

func (c *cluster) one(claim, class string, selectors ...string) []string {
	c.t.Helper()
	return c.allocate(claim, resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request("r", class, selectors...)}})
}

func (c *cluster) free(claim string) { delete(c.allocated, claim) }

// placedBy is the expression of a request for the partition of the GPU with that index.
func placedBy(p mig.Partition, index int) string {
	return fmt.Sprintf("device.driver == '%[1]s' && device.attributes['%[1]s'].profile == '%[2]s' && device.attributes['%[1]s'].placement == '%[3]s' && device.attributes['%[1]s'].index == %[4]d",
		dra.DriverName, p.Profile, p.Placement, index)
}
