package main

import (
	"context"
	"fmt"
	"net"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// plugin is a connection to the plugin's socket beside the kubelet's own, with
// the calls that are compared.
type plugin struct {
	api.DevicePluginClient
	close func()
	// devices are all that the kubelet has.
	devices []string
}

// dial connects to the socket that was registered last.
func (s *stage) dial() (plugin, error) {
	known := s.kubelet.Snapshot().Resources[resource]
	socket := filepath.Join(s.plugins(), filepath.Base(known.Socket))
	connection, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}))
	if err != nil {
		return plugin{}, fmt.Errorf("connect to %s: %w", socket, err)
	}
	p := plugin{DevicePluginClient: api.NewDevicePluginClient(connection), close: func() { _ = connection.Close() }}
	for _, device := range known.Devices {
		p.devices = append(p.devices, device.ID)
	}
	return p, nil
}

// empty is a call that the plugin answers without doing anything.
func (p plugin) empty(ctx context.Context) error {
	_, err := p.GetDevicePluginOptions(ctx, &api.Empty{})
	return err
}

// allocate is the call for the i-th container, with one device.
func (p plugin) allocate(ctx context.Context, i int) error {
	id := p.devices[i%len(p.devices)]
	_, err := p.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{id}}}})
	return err
}

// prefer asks for so many of all devices. With 0 there is nothing to choose, so
// that the plugin decodes the request and does nothing else.
func (p plugin) prefer(ctx context.Context, size int32) error {
	answer, err := p.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{
		ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: p.devices, AllocationSize: size}},
	})
	if err != nil {
		return err
	}
	if chosen := len(answer.ContainerResponses[0].DeviceIDs); chosen != int(size) {
		return fmt.Errorf("%d devices were preferred, want %d", chosen, size)
	}
	return nil
}
