package dradriver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/wake"
)

// serve serves the kubelet until ctx ends.
func (d *Driver) serve(ctx context.Context) {
	retry := d.timing.retry
	for ctx.Err() == nil {
		err := d.serveOnce(ctx, func() {
			retry = d.timing.retry
			d.change(func(s *driverStatus) { s.unserved = "" })
		})
		if ctx.Err() != nil {
			return
		}
		d.change(func(s *driverStatus) { s.unserved, s.registered = text(err), false })
		wake.Sleep(ctx, retry.Step())
	}
}

// serveOnce creates both sockets and serves them until ctx ends or one of them is lost.
func (d *Driver) serveOnce(ctx context.Context, serving func()) error {
	suffix := ""
	if d.options.PodUID != "" {
		suffix = "-" + d.options.PodUID
	}
	// The names are the same as in Kubernetes' own helper (k8s.io/dynamic-resource-allocation
	// v0.36.3, kubeletplugin/draplugin.go).
	socket := filepath.Join(d.options.Dir, "dra"+suffix+".sock")
	door := filepath.Join(d.options.RegistryDir, d.options.Driver+suffix+"-reg.sock")
	if err := os.MkdirAll(d.options.Dir, 0o750); err != nil {
		return fmt.Errorf("make the driver's directory: %w", err)
	}
	if err := removeStale(filepath.Join(d.options.Dir, "dra*.sock"),
		filepath.Join(d.options.RegistryDir, d.options.Driver+"-*reg.sock")); err != nil {
		return err
	}
	// A handler's context ends with the server, which waits for the handler.
	calls, registrar := grpc.NewServer(grpc.WaitForHandlers(true)), grpc.NewServer(grpc.WaitForHandlers(true))
	drapb.RegisterDRAPluginServer(calls, &plugin{driver: d})
	drahealth.RegisterDRAResourceHealthServer(calls, &health{driver: d})
	registration.RegisterRegistrationServer(registrar, &registrant{driver: d, endpoint: socket})

	listening, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listen for the kubelet: %w", err)
	}
	// The kubelet connects as soon as it sees the second socket.
	registering, err := net.Listen("unix", door)
	if err != nil {
		_ = listening.Close()
		return fmt.Errorf("register with the kubelet: %w", err)
	}
	serving()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return calls.Serve(listening) })
	group.Go(func() error { return registrar.Serve(registering) })
	group.Go(func() error {
		defer calls.Stop()
		defer registrar.Stop() // Stopped first, so that the kubelet makes no more calls.
		return d.watchSockets(ctx, socket, door)
	})
	return group.Wait()
}

// watchSockets returns when ctx ends or a socket is missing from its directory.
func (d *Driver) watchSockets(ctx context.Context, sockets ...string) error {
	for {
		if !wake.Sleep(ctx, d.timing.beat) {
			return nil
		}
		for _, socket := range sockets {
			if _, err := os.Lstat(socket); err != nil {
				return fmt.Errorf("socket removed: %w", err)
			}
		}
	}
}

// removeStale removes sockets on which no program listens, left behind by killed pods. If a socket
// answers, it belongs to a different driver of the same name, because of our own programs only the
// one with the node's lock gets here.
func removeStale(patterns ...string) error {
	for _, pattern := range patterns {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return fmt.Errorf("find sockets: %w", err)
		}
		for _, path := range paths {
			connection, err := net.DialTimeout("unix", path, time.Second)
			if err == nil {
				_ = connection.Close()
				return fmt.Errorf("another program serves this driver's name at %s", path)
			}
			if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("look who serves: %w", err)
			}
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("remove an old socket: %w", err)
			}
		}
	}
	return nil
}

// registrant tells the kubelet the driver's endpoint.
type registrant struct {
	registration.UnimplementedRegistrationServer
	driver   *Driver
	endpoint string
}

// GetInfo returns the services and their endpoint.
func (r *registrant) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.DRAPlugin,
		Name:              r.driver.options.Driver,
		Endpoint:          r.endpoint,
		SupportedVersions: []string{drapb.DRAPluginService, drahealth.DRAResourceHealth_ServiceDesc.ServiceName},
	}, nil
}

// NotifyRegistrationStatus receives the kubelet's answer.
func (r *registrant) NotifyRegistrationStatus(
	_ context.Context,
	said *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	r.driver.change(func(s *driverStatus) {
		s.registered, s.unserved = said.GetPluginRegistered(), ""
		if !s.registered {
			s.unserved = "the kubelet refuses: " + said.GetError()
		}
	})
	return &registration.RegistrationStatusResponse{}, nil
}

// plugin answers the kubelet's calls.
type plugin struct {
	drapb.UnimplementedDRAPluginServer
	driver *Driver
}

// NodePrepareResources prepares the claims of a pod concurrently.
func (p *plugin) NodePrepareResources(
	ctx context.Context,
	request *drapb.NodePrepareResourcesRequest,
) (*drapb.NodePrepareResourcesResponse, error) {
	return &drapb.NodePrepareResourcesResponse{Claims: each(request.GetClaims(),
		func(claim *drapb.Claim) *drapb.NodePrepareResourceResponse {
			begun := time.Now()
			devices, err := p.driver.prepare(ctx, claim)
			p.driver.options.Observe(Prepare, time.Since(begun), err)
			return &drapb.NodePrepareResourceResponse{Devices: devices, Error: text(err)}
		})}, nil
}

// NodeUnprepareResources takes the devices of claims back. The claims' objects may be gone.
func (p *plugin) NodeUnprepareResources(
	ctx context.Context,
	request *drapb.NodeUnprepareResourcesRequest,
) (*drapb.NodeUnprepareResourcesResponse, error) {
	return &drapb.NodeUnprepareResourcesResponse{Claims: each(request.GetClaims(),
		func(claim *drapb.Claim) *drapb.NodeUnprepareResourceResponse {
			begun := time.Now()
			err := p.driver.options.Claims.Unprepare(dra.Claim{
				UID:       claim.GetUid(),
				Namespace: claim.GetNamespace(),
				Name:      claim.GetName(),
			})
			p.driver.options.Observe(Unprepare, time.Since(begun), err)
			return &drapb.NodeUnprepareResourceResponse{Error: text(err)}
		})}, nil
}

// each calls answer for each claim and returns the results by the claim's UID.
func each[T any](claims []*drapb.Claim, answer func(*drapb.Claim) T) map[string]T {
	answers := make(map[string]T, len(claims))
	var mutex sync.Mutex
	var group sync.WaitGroup
	for _, claim := range claims {
		group.Go(func() {
			answered := answer(claim)
			mutex.Lock()
			defer mutex.Unlock()
			answers[claim.GetUid()] = answered
		})
	}
	group.Wait()
	return answers
}

func (d *Driver) prepare(ctx context.Context, asked *drapb.Claim) ([]*drapb.Device, error) {
	var claim resourceapi.ResourceClaim
	err := d.api.Insist(ctx, d.api.Get().AbsPath(resourceAPI).Namespace(asked.GetNamespace()).Resource(resourceClaims).
		Name(asked.GetName())).Into(&claim)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read claim %s/%s: %w", asked.GetNamespace(), asked.GetName(), err)
	case string(claim.UID) != asked.GetUid():
		return nil, fmt.Errorf("claim %s/%s is another one now", asked.GetNamespace(), asked.GetName())
	case claim.Status.Allocation == nil:
		return nil, fmt.Errorf("claim %s/%s is not allocated", asked.GetNamespace(), asked.GetName())
	}
	own := d.own(&claim)
	cdi, err := d.options.Claims.Prepare(ctx, own)
	if err != nil {
		return nil, err
	}
	var devices []*drapb.Device
	for i, r := range own.Results {
		// The kubelet knows only requests, without subrequests (resourceclaim.BaseRequestRef).
		request, _, _ := strings.Cut(r.Request, "/")
		device := &drapb.Device{
			PoolName:     d.pool,
			DeviceName:   r.Device,
			RequestNames: []string{request},
			CdiDeviceIds: cdi[i],
		}
		if r.ShareID != "" {
			device.ShareId = &r.ShareID
		}
		devices = append(devices, device)
	}
	return devices, nil
}

// own returns the part of an allocated claim that concerns this driver.
func (d *Driver) own(claim *resourceapi.ResourceClaim) dra.Claim {
	c := dra.Claim{
		UID:       string(claim.UID),
		Namespace: claim.Namespace,
		Name:      claim.Name,
		ByName:    claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true",
	}
	for _, config := range claim.Status.Allocation.Devices.Config {
		if config.Opaque != nil && config.Opaque.Driver == d.options.Driver {
			c.Configs = append(c.Configs, config.Opaque.Parameters.Raw)
		}
	}
	for _, allocated := range claim.Status.Allocation.Devices.Results {
		if allocated.Driver != d.options.Driver || allocated.Pool != d.pool {
			continue
		}
		shares := allocated.ConsumedCapacity[dra.SharesCapacity]
		result := dra.Result{
			Request: allocated.Request,
			Device:  allocated.Device,
			Shares:  shares.Value(),
			Admin:   allocated.AdminAccess != nil && *allocated.AdminAccess,
		}
		if allocated.ShareID != nil {
			result.ShareID = string(*allocated.ShareID)
		}
		c.Results = append(c.Results, result)
	}
	return c
}

// health reports the health of claims' devices to the kubelet.
type health struct {
	drahealth.UnimplementedDRAResourceHealthServer
	driver *Driver
}

// NodeWatchResources sends all devices at each change, and again before the kubelet would forget
// them.
func (h *health) NodeWatchResources(
	_ *drahealth.NodeWatchResourcesRequest,
	stream drahealth.DRAResourceHealth_NodeWatchResourcesServer,
) error {
	for {
		devices, changed := h.driver.options.Claims.Devices()
		response := &drahealth.NodeWatchResourcesResponse{}
		for _, device := range devices {
			status := drahealth.HealthStatus_UNHEALTHY
			if device.Healthy {
				status = drahealth.HealthStatus_HEALTHY
			}
			response.Devices = append(response.Devices, &drahealth.DeviceHealth{
				Device:          &drahealth.DeviceIdentifier{PoolName: h.driver.pool, DeviceName: device.Device},
				Health:          status,
				Message:         device.Reason,
				LastUpdatedTime: device.Since.Unix(),
			})
		}
		if err := stream.Send(response); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		case <-time.After(h.driver.timing.beat):
		}
	}
}
