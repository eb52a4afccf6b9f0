package podresources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/virgate/virgate/sharing"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// startupPeriod is how long after a start of the kubelet PodResources alone is not trusted: the
// kubelet serves it before it knows the API server's pods again.
const startupPeriod = time.Minute

// Held returns which containers hold which devices, of any resource and any plugin, sorted by
// namespace, pod, container and resource; nil if no container holds any.
//
// It returns what PodResources shows, and what the checkpoint has beyond that. For a pod that
// PodResources does not show, only the UID is known: Namespace is empty, and Pod is "uid:" followed
// by the UID. Such a pod may be gone. The kubelet forgets it when a client calls PodResources or a
// pod with devices is admitted, and it then writes its checkpoint, as it does after every list from
// a plugin. A device that an init container passed on may appear for both containers.
//
// Containers that have GPUs from a DRA driver, by a claim, are included. They are not in the
// checkpoint. While PodResources does not answer, or so soon after the kubelet's start that it may
// not know all pods, the claims of its last answer are added.
//
// The error is ErrIncomplete or ErrUnknown, with the causes.
func (s *Source) Held(ctx context.Context) ([]sharing.Allocation, error) {
	return s.held(ctx, s.limiter)
}

func (s *Source) held(ctx context.Context, limiter *rate.Limiter) ([]sharing.Allocation, error) {
	listed, listErr := call(ctx, s, limiter,
		func(ctx context.Context, client api.PodResourcesListerClient) (*api.ListPodResourcesResponse, error) {
			return client.List(ctx, &api.ListPodResourcesRequest{})
		})
	// Read after List, so that what was admitted in between is in the file.
	checkpoint, fileErr := s.readCheckpoint()
	if asked := s.connection == nil || listErr == nil || isStatus(listErr) && ctx.Err() == nil; asked {
		now := unread{listErr, fileErr}
		if errors.Is(fileErr, fs.ErrNotExist) {
			now.checkpoint = nil
		}
		s.setUnread(now)
	}
	if listErr != nil && fileErr != nil {
		return nil, unknown(listErr, fileErr)
	}
	if fileErr != nil {
		if err := s.afterStartup(); err != nil && !s.noCheckpointYet(fileErr) {
			return nil, fmt.Errorf("%w: %w; checkpoint: %w", ErrIncomplete, err, fileErr)
		}
	}
	held := append(merge(listed.GetPodResources(), checkpoint.Entries),
		s.claimed(listed.GetPodResources(), listErr == nil)...)
	slices.SortFunc(held, func(a, b sharing.Allocation) int {
		return slices.Compare([]string{a.Namespace, a.Pod, a.Container, a.Resource, a.Claim},
			[]string{b.Namespace, b.Pod, b.Container, b.Resource, b.Claim})
	})
	return held, nil
}

// isStatus reports whether gRPC itself returned the error, which means that a call was tried.
func isStatus(err error) bool {
	_, ok := status.FromError(err)
	return ok
}

// HeldTogether is Held for many callers at once. They share a call that began after all of them had
// asked, so that a storm of claims costs the kubelet only a few calls. A pod waits for the answer,
// so the call does not queue behind Held. The answer must not be changed.
func (s *Source) HeldTogether(ctx context.Context) ([]sharing.Allocation, error) {
	return s.holders.ask(ctx, func(ctx context.Context, begins func()) ([]sharing.Allocation, error) {
		begins()
		return s.held(ctx, s.urgent)
	})
}

// claimed returns the containers that have GPUs by claims. known is true if PodResources has answered.
func (s *Source) claimed(pods []*api.PodResources, known bool) (held []sharing.Allocation) {
	if s.options.Claimed == nil {
		return nil
	}
	for _, pod := range pods {
		for _, container := range pod.Containers {
			for _, claim := range container.DynamicResources {
				held = append(held, s.claimedFrom(pod, container.Name, claim)...)
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	started, _ := s.started()
	settled := known && s.afterStartup() == nil
	shown := slices.Clone(held)
	s.claims = slices.DeleteFunc(s.claims, func(last seenClaim) bool {
		again := slices.ContainsFunc(shown, func(a sharing.Allocation) bool {
			return a.Namespace == last.Namespace && a.Pod == last.Pod && a.Container == last.Container &&
				a.Claim == last.Claim
		})
		if again || settled || known && started.Equal(last.kubelet) {
			return true
		}
		held = append(held, last.Allocation)
		return false
	})
	for _, a := range shown {
		s.claims = append(s.claims, seenClaim{a, started})
	}
	return held
}

// seenClaim is a claim that PodResources showed, with the start time of the kubelet that showed it.
// Once the same kubelet no longer shows the claim, the claim has ended.
type seenClaim struct {
	sharing.Allocation
	kubelet time.Time
}

// claimedFrom returns an allocation for each driver that allocated GPUs for the claim. With each
// device, the kubelet also names the CDI entries of the devices before it, so claimedFrom handles a
// driver's devices together.
func (s *Source) claimedFrom(
	pod *api.PodResources,
	container string,
	claim *api.DynamicResource,
) (held []sharing.Allocation) {
	devices, names := map[string][]string{}, map[string][]string{}
	for _, resource := range claim.ClaimResources {
		devices[resource.DriverName] = append(devices[resource.DriverName], resource.DeviceName)
		for _, device := range resource.CdiDevices {
			names[resource.DriverName] = append(names[resource.DriverName], device.Name)
		}
	}
	for driver := range devices {
		if units, anyGPU := s.options.Claimed(driver, devices[driver], names[driver]); len(units) > 0 {
			held = append(held, sharing.Allocation{
				Namespace: pod.Namespace,
				Pod:       pod.Name,
				Container: container,
				Resource:  driver,
				Devices:   units,
				Claim:     claim.ClaimName,
				AnyGPU:    anyGPU,
			})
		}
	}
	return held
}

// Applied returns the devices that the kubelet considers healthy, held or not, sorted, by resource. A
// resource without healthy devices, or without a plugin, is not in the map. The map must not be changed.
//
// Without PodResources, it returns what the kubelet last wrote to its checkpoint. The kubelet
// writes that right after each list, but it does not show that a plugin's stream has ended.
//
// The error is ErrUnknown, with the causes.
func (s *Source) Applied(ctx context.Context) (map[string][]string, error) {
	healthy, listErr := s.allocatable(ctx)
	if listErr == nil {
		return healthy, nil
	}
	checkpoint, fileErr := s.readCheckpoint()
	if fileErr != nil {
		return nil, unknown(listErr, fileErr)
	}
	s.logger.Debug("applied devices read from the checkpoint", "error", listErr)
	return checkpoint.Registered, nil
}

func unknown(listErr, fileErr error) error {
	return fmt.Errorf("%w: PodResources: %w; checkpoint: %w", ErrUnknown, listErr, fileErr)
}

// noCheckpointYet reports whether the kubelet runs and its directory has no checkpoint, so that no
// pod can hold a device that PodResources does not show. The kubelet reads the checkpoint at its
// start, before it creates kubelet.sock, and writes it with every list and every grant. So a device
// that is not in it then will not be in it a minute later either.
func (s *Source) noCheckpointYet(fileErr error) bool {
	_, err := s.started()
	return err == nil && errors.Is(fileErr, fs.ErrNotExist)
}

// afterStartup returns an error while PodResources may not know all pods yet: the kubelet has
// started recently, or the time of its start is unknown.
func (s *Source) afterStartup() error {
	started, err := s.started()
	if err != nil {
		return fmt.Errorf("time of the kubelet's start unknown: %w", err)
	}
	if age := s.options.Now().Sub(started); age < startupPeriod {
		return fmt.Errorf("kubelet started %v ago", age.Round(time.Second))
	}
	return nil
}

// started returns when the kubelet created kubelet.sock, which it does at each start.
func (s *Source) started() (time.Time, error) {
	if s.options.CheckpointDir == "" {
		return time.Time{}, errNoCheckpoint
	}
	info, err := os.Stat(filepath.Join(s.options.CheckpointDir, "kubelet.sock"))
	if err != nil {
		return time.Time{}, err
	}
	return info.ModTime(), nil
}

// Serving reports whether the kubelet is connected to a plugin that offers healthy devices of the
// resource.
//
// Only PodResources can tell: the checkpoint still shows a resource's devices after its plugin has
// gone. The error comes from PodResources.
func (s *Source) Serving(ctx context.Context, resource string) (bool, error) {
	healthy, err := s.allocatable(ctx)
	return len(healthy[resource]) > 0, err
}

// allocatable returns, from PodResources, the devices that the kubelet considers healthy, sorted,
// by resource. Several callers may share the result; it must not be changed.
func (s *Source) allocatable(ctx context.Context) (map[string][]string, error) {
	return s.allocatables.ask(ctx, func(ctx context.Context, begins func()) (map[string][]string, error) {
		encoded, err := call(ctx, s, s.limiter,
			func(ctx context.Context, _ api.PodResourcesListerClient) (*emptypb.Empty, error) {
				begins()
				response := &emptypb.Empty{} // It has no fields, and so keeps all data undecoded.
				return response, s.connection.Invoke(ctx, api.PodResourcesLister_GetAllocatableResources_FullMethodName,
					&api.AllocatableResourcesRequest{}, response)
			})
		if err != nil {
			return nil, err
		}
		return allocatableDevices(encoded.ProtoReflect().GetUnknown())
	})
}

// allocatableDevices decodes an AllocatableResourcesResponse field by field: it has several
// messages for each device, and there may be thousands of devices.
func allocatableDevices(encoded []byte) (map[string][]string, error) {
	var err error
	devices := devicesByResource(func(yield func(*api.ContainerDevices) bool) {
		for len(encoded) > 0 && err == nil {
			_, _, length := protowire.ConsumeField(encoded) // It was decoded once, so this does not fail.
			var part api.AllocatableResourcesResponse
			err = proto.Unmarshal(encoded[:length], &part)
			encoded = encoded[length:]
			for _, entry := range part.Devices {
				yield(entry)
			}
		}
	})
	return devices, err
}

// devicesByResource merges entries: a device has one entry for each of its NUMA nodes.
func devicesByResource(entries iter.Seq[*api.ContainerDevices]) map[string][]string {
	devices := map[string][]string{}
	for entry := range entries {
		if len(entry.DeviceIds) > 0 {
			devices[entry.ResourceName] = append(devices[entry.ResourceName], entry.DeviceIds...)
		}
	}
	for resource, ids := range devices {
		slices.Sort(ids)
		devices[resource] = slices.Compact(ids)
	}
	return devices
}

// device is an ID with its resource: an ID is unique only within its resource.
type device struct{ resource, id string }

// merge returns what the listed pods hold, plus what the checkpoint's entries have beyond that: the
// devices that no listed container holds.
func merge(listed []*api.PodResources, entries []Entry) []sharing.Allocation {
	var held []sharing.Allocation
	owners := map[device]sharing.Container{}
	for _, pod := range listed {
		for _, container := range pod.Containers {
			by := sharing.Container{
				Namespace: pod.Namespace,
				Pod:       pod.Name,
				Name:      container.Name,
			}
			for resource, ids := range devicesByResource(slices.Values(container.Devices)) {
				for _, id := range ids {
					owners[device{resource, id}] = by
				}
				held = append(held, allocation(by, resource, ids))
			}
		}
	}
	pods := identify(entries, owners)
	for _, entry := range entries {
		hidden := slices.DeleteFunc(slices.Clone(entry.Devices), func(id string) bool {
			_, shown := owners[device{entry.Resource, id}]
			return shown
		})
		if len(hidden) == 0 {
			continue
		}
		by, ok := pods[entry.PodUID]
		if !ok {
			by = sharing.Container{Pod: "uid:" + entry.PodUID}
		}
		by.Name = entry.Container
		held = append(held, allocation(by, entry.Resource, hidden))
	}
	return held
}

func allocation(by sharing.Container, resource string, ids []string) sharing.Allocation {
	return sharing.Allocation{
		Namespace: by.Namespace,
		Pod:       by.Pod,
		Container: by.Name,
		Resource:  resource,
		Devices:   ids,
	}
}

// identify finds the pods behind the checkpoint's UIDs: the pods that PodResources shows with a
// container of the same name and the same device. It leaves the name of the container empty.
func identify(entries []Entry, owners map[device]sharing.Container) map[string]sharing.Container {
	pods := map[string]sharing.Container{}
	for _, entry := range entries {
		for _, id := range entry.Devices {
			if by, shown := owners[device{entry.Resource, id}]; shown && by.Name == entry.Container {
				pods[entry.PodUID] = sharing.Container{Namespace: by.Namespace, Pod: by.Pod}
			}
		}
	}
	return pods
}
