package simdra

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Request is a claim's request for devices.
type Request struct {
	// Resource and Profile are required values of the attributes with those names; empty for any.
	Resource, Profile string
	// Count is the number of devices; 0 means 1. Capacity is what each device must have, or, for a
	// shared device, what the claim takes of it.
	Count    int
	Capacity map[resourceapi.QualifiedName]resource.Quantity
}

// ErrUnschedulable is the error when no devices fit now.
var ErrUnschedulable = errors.New("cannot allocate all claims")

// Allocate creates a claim in the namespace default and allocates devices to it as the scheduler
// does: the first ones that fit, by slice and position in it. It does not backtrack.
func (a *API) Allocate(name string, request Request) (*resourceapi.ResourceClaim, error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	defer a.wake()
	s, err := a.newScheduler()
	if err != nil {
		return nil, err
	}
	var results []resourceapi.DeviceRequestAllocationResult
	for _, device := range s.devices {
		if len(results) == max(request.Count, 1) {
			break
		}
		consumed, fits := s.fits(device, request)
		if !fits {
			continue
		}
		result := resourceapi.DeviceRequestAllocationResult{
			Request:          "gpu",
			Driver:           a.driver,
			Pool:             s.pool,
			Device:           device.Name,
			ConsumedCapacity: consumed,
		}
		if device.AllowMultipleAllocations != nil {
			a.version++
			result.ShareID = new(types.UID("share-" + strconv.Itoa(a.version)))
		}
		s.book(result)
		results = append(results, result)
	}
	if len(results) < max(request.Count, 1) {
		return nil, ErrUnschedulable
	}
	a.version++
	claim := &resourceapi.ResourceClaim{
		TypeMeta: typeOf("ResourceClaim"),
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceDefault,
			Name:      name,
			UID:       types.UID("claim-" + strconv.Itoa(a.version)),
		},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: results},
		}},
	}
	a.Claims[claim.Namespace+"/"+name] = claim
	return claim, nil
}

// scheduler is the scheduler's view of the driver's pool.
type scheduler struct {
	pool    string
	devices []resourceapi.Device
	// counters has the counters' remaining values, by set and name.
	counters map[string]map[string]int64
	// used has the devices that claims have, with the capacity that they consume of each.
	used map[string]map[resourceapi.QualifiedName]int64
}

// newScheduler reads the pool. Nothing is allocated from a pool until all its slices are there.
func (a *API) newScheduler() (*scheduler, error) {
	s := &scheduler{counters: map[string]map[string]int64{}, used: map[string]map[resourceapi.QualifiedName]int64{}}
	var newest resourceapi.ResourcePool
	for _, slice := range a.Slices {
		if slice.Spec.Pool.Generation > newest.Generation {
			newest = slice.Spec.Pool
		}
	}
	s.pool = newest.Name
	found := int64(0)
	for _, slice := range a.Sorted() {
		if slice.Spec.Pool.Generation < newest.Generation {
			continue
		}
		found++
		s.devices = append(s.devices, slice.Spec.Devices...)
		for _, set := range slice.Spec.SharedCounters {
			s.counters[set.Name] = map[string]int64{}
			for name, counter := range set.Counters {
				s.counters[set.Name][name] = counter.Value.Value()
			}
		}
	}
	if found == 0 || found < newest.ResourceSliceCount {
		return nil, fmt.Errorf("%w: %d of %d slices are there", ErrUnschedulable, found, newest.ResourceSliceCount)
	}
	for _, claim := range a.Claims {
		if claim.Status.Allocation != nil {
			for _, result := range claim.Status.Allocation.Devices.Results {
				s.book(result)
			}
		}
	}
	return s, nil
}

// book allocates a device, or a share of a shared one. Only the first share consumes the device's
// counters.
func (s *scheduler) book(result resourceapi.DeviceRequestAllocationResult) {
	taken, again := s.used[result.Device]
	if !again {
		taken = map[resourceapi.QualifiedName]int64{}
		s.used[result.Device] = taken
	}
	for name, quantity := range result.ConsumedCapacity {
		taken[name] += quantity.Value()
	}
	i := slices.IndexFunc(s.devices, func(d resourceapi.Device) bool { return d.Name == result.Device })
	if again || i < 0 {
		return
	}
	for _, consumption := range s.devices[i].ConsumesCounters {
		for name, counter := range consumption.Counters {
			s.counters[consumption.CounterSet][name] -= counter.Value.Value()
		}
	}
}

// fits reports whether the request can have the device, and how much it consumes of a shared one.
func (s *scheduler) fits(
	device resourceapi.Device,
	request Request,
) (consumed map[resourceapi.QualifiedName]resource.Quantity, fits bool) {
	is := func(name resourceapi.QualifiedName, want string) bool {
		value := device.Attributes[name].StringValue
		return want == "" || value != nil && *value == want
	}
	taken, used := s.used[device.Name]
	shared := device.AllowMultipleAllocations != nil && *device.AllowMultipleAllocations
	if len(device.Taints) > 0 || !is("resource", request.Resource) || !is("profile", request.Profile) ||
		used && !shared {
		return nil, false
	}
	for name, capacity := range device.Capacity {
		want, asked := request.Capacity[name]
		if shared {
			switch policy := capacity.RequestPolicy; {
			case asked:
			case policy != nil && policy.Default != nil:
				want = *policy.Default
			default:
				want = capacity.Value
			}
			if consumed == nil {
				consumed = map[resourceapi.QualifiedName]resource.Quantity{}
			}
			consumed[name] = want
		}
		if taken[name]+want.Value() > capacity.Value.Value() {
			return nil, false
		}
	}
	for _, consumption := range device.ConsumesCounters {
		for name, counter := range consumption.Counters {
			if !used && s.counters[consumption.CounterSet][name] < counter.Value.Value() {
				return nil, false
			}
		}
	}
	return consumed, true
}

// Release deletes a claim, as Kubernetes does when its pod is gone.
func (a *API) Release(claim *resourceapi.ResourceClaim) {
	a.Do(func() { delete(a.Claims, claim.Namespace+"/"+claim.Name) })
}

// Kubelet is the kubelet's end of a connection to a driver.
type Kubelet struct {
	connection *grpc.ClientConn
	client     drapb.DRAPluginClient
}

// Register waits for a driver's socket in the registry, as the kubelet's plugin watcher does, and
// connects to it. Close disconnects.
func Register(ctx context.Context, registry string) (*Kubelet, error) {
	var doors []string
	for len(doors) == 0 {
		var err error
		doors, err = filepath.Glob(filepath.Join(registry, "*-reg.sock"))
		if err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
	door, err := dial(doors[0])
	if err != nil {
		return nil, err
	}
	defer func() { _ = door.Close() }()
	client := registration.NewRegistrationClient(door)
	info, err := client.GetInfo(ctx, &registration.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	if info.GetType() != registration.DRAPlugin ||
		!slices.Contains(info.GetSupportedVersions(), drapb.DRAPluginService) {
		return nil, fmt.Errorf("%s is no DRA driver: %v", doors[0], info)
	}
	if _, err := client.NotifyRegistrationStatus(ctx,
		&registration.RegistrationStatus{PluginRegistered: true}); err != nil {
		return nil, err
	}
	connection, err := dial(info.GetEndpoint())
	if err != nil {
		return nil, err
	}
	return &Kubelet{connection, drapb.NewDRAPluginClient(connection)}, nil
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// Close disconnects from the driver.
func (k *Kubelet) Close() error { return k.connection.Close() }

// Prepare makes the driver prepare the claim, as the kubelet does before the pod's containers
// start. The kubelet retries after an error.
func (k *Kubelet) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]*drapb.Device, error) {
	asked := asked(claim)
	response, err := k.client.NodePrepareResources(ctx,
		&drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{asked}})
	if err != nil {
		return nil, err
	}
	answer := response.GetClaims()[asked.GetUid()]
	if message := answer.GetError(); message != "" {
		return nil, errors.New(message)
	}
	return answer.GetDevices(), nil
}

// Unprepare makes the driver undo Prepare, as the kubelet does after the containers have ended.
func (k *Kubelet) Unprepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	asked := asked(claim)
	response, err := k.client.NodeUnprepareResources(ctx,
		&drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{asked}})
	if err != nil {
		return err
	}
	if message := response.GetClaims()[asked.GetUid()].GetError(); message != "" {
		return errors.New(message)
	}
	return nil
}

func asked(claim *resourceapi.ResourceClaim) *drapb.Claim {
	return &drapb.Claim{
		Namespace: claim.Namespace,
		Name:      claim.Name,
		Uid:       string(claim.UID),
	}
}
