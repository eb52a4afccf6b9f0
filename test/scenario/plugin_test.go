package scenario

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

func (c *call) allocate() error {
	resource, ids := c.take(), c.arguments
	var pattern *regexp.Regexp
	if c.not {
		if len(ids) == 0 {
			return errUsage
		}
		last := len(ids) - 1
		var err error
		if pattern, err = regexp.Compile(ids[last]); err != nil {
			return err
		}
		ids = ids[:last]
	}
	err := c.ask(resource, func(ctx context.Context, plugin api.DevicePluginClient) error {
		_, err := plugin.Allocate(ctx, &api.AllocateRequest{
			ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}},
		})
		return err
	})
	switch {
	case !c.not:
		return err
	case err == nil:
		return fmt.Errorf("%q were granted", ids)
	case !pattern.MatchString(err.Error()):
		return fmt.Errorf("refused with another error: %w", err)
	}
	return nil
}

// prefers asks until the choice among the free devices is as wanted: a new
// policy makes no difference that the kubelet could wait for.
func (c *call) prefers() error {
	resource := c.take()
	size, err := strconv.Atoi(c.take())
	if err != nil {
		return errUsage
	}
	var want, got []string
	for len(c.arguments) > 0 {
		unit, err := c.unitID(c.take())
		if err != nil {
			return err
		}
		want = append(want, unit)
	}
	slices.Sort(want)
	err = c.ask(resource, func(ctx context.Context, plugin api.DevicePluginClient) error {
		for {
			response, err := plugin.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{
				ContainerRequests: []*api.ContainerPreferredAllocationRequest{{
					AvailableDeviceIDs: free(c.kubelet.Snapshot(), resource), AllocationSize: int32(size),
				}},
			})
			if err != nil {
				return err
			}
			got = nil
			for _, id := range response.ContainerResponses[0].DeviceIDs {
				unit, _, _ := sharing.ParseDeviceID(id)
				got = append(got, unit)
			}
			slices.Sort(got)
			if slices.Equal(slices.Compact(got), want) {
				return nil
			}
		}
	})
	if err != nil {
		return fmt.Errorf("%w; the last choice was of %s", err, got)
	}
	return nil
}

// free are the healthy devices that no pod holds.
func free(k simkubelet.Snapshot, resource string) []string {
	held := map[string]bool{}
	for _, pod := range k.Pods {
		for _, c := range pod.Containers {
			for _, id := range c.Devices(resource) {
				held[id] = true
			}
		}
	}
	var ids []string
	for _, d := range k.Resources[resource].Devices {
		if d.Healthy && !held[d.ID] {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// ask makes calls to the plugin of a resource.
func (c *call) ask(resource string, question func(context.Context, api.DevicePluginClient) error) error {
	socket := filepath.Join(c.plugins(), c.kubelet.Snapshot().Resources[resource].Socket)
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return question(ctx, api.NewDevicePluginClient(connection))
}
