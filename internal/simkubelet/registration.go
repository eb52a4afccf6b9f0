package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// registrationServer is what listens on kubelet.sock.
type registrationServer struct {
	api.UnimplementedRegistrationServer
	kubelet *Kubelet
	process *process
}

// Register dials the plugin back and asks for its options before it answers.
// The options in the request are ignored, as by the real kubelet.
func (s *registrationServer) Register(ctx context.Context, request *api.RegisterRequest) (*api.Empty, error) {
	k, p := s.kubelet, s.process
	if err := k.receiveRegistration(ctx, p, request.ResourceName); err != nil {
		return nil, err
	}
	if request.Version != api.Version {
		return nil, fmt.Errorf("device plugin API version %q is not supported, only %q is", request.Version, api.Version)
	}
	if err := checkResourceName(request.ResourceName); err != nil {
		return nil, err
	}
	path := filepath.Join(k.options.Dir, request.Endpoint)
	if err := k.connect(ctx, p, request.ResourceName, path); err != nil {
		k.logger.Error("registration failed", "resource", request.ResourceName, "socket", path, "error", err)
		return nil, err
	}
	k.logger.Info("registered", "resource", request.ResourceName, "socket", path)
	return &api.Empty{}, nil
}

// receiveRegistration counts the call and plays the misbehaviour that tests
// have asked for.
func (k *Kubelet) receiveRegistration(ctx context.Context, p *process, resource string) error {
	k.lock()
	k.counter(resource).registrations++
	k.tell(Event{Kind: Registering, Resource: resource})
	silent := k.misbehaviour.silent
	refused := k.misbehaviour.refusals > 0
	if refused && !silent {
		k.misbehaviour.refusals--
	}
	k.unlock()
	switch {
	case silent:
		select {
		case <-ctx.Done():
		case <-p.stopping:
		}
		return status.Error(codes.DeadlineExceeded, "kubelet is silent")
	case refused:
		return status.Error(codes.Unavailable, "kubelet refuses to register")
	}
	return nil
}

// connect makes the plugin at path the resource's client and endpoint.
//
// The client is entered before the dial and is removed again when that fails.
// So a failed Register on a live resource leaves the old plugin serving, with
// nobody to notice its end.
func (k *Kubelet) connect(ctx context.Context, p *process, resource, path string) error {
	c, err := newClient(resource, path)
	if err != nil {
		return err
	}
	k.lock()
	p.clients[resource] = c
	p.connections[c] = struct{}{}
	k.unlock()

	options, err := k.greet(ctx, c)
	k.lock()
	defer k.unlock()
	if err != nil {
		delete(p.clients, resource)
		delete(p.connections, c)
		c.close()
		return err
	}
	p.endpoints[resource] = &endpoint{client: c, options: options}
	k.counter(resource).socket = filepath.Base(path)
	p.goroutines.Go(func() { k.runClient(p, c) })
	return nil
}

func (k *Kubelet) greet(ctx context.Context, c *client) (*api.DevicePluginOptions, error) {
	dialing, cancel := context.WithTimeout(ctx, k.options.DialTimeout)
	defer cancel()
	if err := c.dial(dialing); err != nil {
		return nil, fmt.Errorf("failed to dial device plugin: %w", err) // the kubelet's words
	}
	options, err := c.plugin.GetDevicePluginOptions(ctx, &api.Empty{})
	if err != nil {
		return nil, fmt.Errorf("get device plugin options: %w", err)
	}
	return options, nil
}

// errShutdown ends a dial whose connection was closed.
var errShutdown = errors.New("connection closed")
