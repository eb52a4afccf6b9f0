package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/validation"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// registrationServer serves kubelet.sock.
type registrationServer struct {
	api.UnimplementedRegistrationServer
	kubelet *Kubelet
	process *process
}

// Register connects to the plugin and requests its options before it answers. Like the kubelet it
// ignores the options in the request.
func (s *registrationServer) Register(ctx context.Context, request *api.RegisterRequest) (*api.Empty, error) {
	k, p := s.kubelet, s.process
	k.lock()
	k.counter(request.ResourceName).Registrations++
	k.notify(Event{Kind: RegisterCalled, Resource: request.ResourceName})
	k.unlock()
	if err := k.options.OnRegister(ctx); err != nil {
		return nil, err
	}
	if request.Version != api.Version {
		return nil, fmt.Errorf("device plugin API version %q is not supported, only %q is", request.Version,
			api.Version)
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

// checkResourceName accepts the same names as the kubelet (IsExtendedResourceName in kubernetes,
// pkg/apis/core/v1/helper): a qualified name with a domain, and with room for quota's prefix
// "requests.".
func checkResourceName(resource string) error {
	switch {
	case !strings.Contains(resource, "/"):
		return fmt.Errorf("resource name %q has no domain", resource)
	case strings.Contains(resource, "kubernetes.io/"):
		return fmt.Errorf("resource name %q is in a domain of Kubernetes itself", resource)
	case strings.HasPrefix(resource, "requests."):
		return fmt.Errorf("resource name %q starts with requests", resource)
	}
	if problems := validation.IsQualifiedName("requests." + resource); len(problems) > 0 {
		return fmt.Errorf("resource name %q: %s", resource, strings.Join(problems, "; "))
	}
	return nil
}

// connect makes the plugin at path the resource's client and endpoint.
//
// The client is stored before it is connected, and removed again if connecting fails. So after a
// failed Register for a live resource the old plugin still serves, but the kubelet does not notice
// when that plugin ends.
func (k *Kubelet) connect(ctx context.Context, p *process, resource, path string) error {
	// The kubelet also has gRPC's limit of 4 MiB a message.
	connection, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	c := &client{
		resource:   resource,
		connection: connection,
		plugin:     api.NewDevicePluginClient(connection),
	}
	k.lock()
	p.clients[resource] = c
	p.connections[c] = struct{}{}
	k.unlock()

	options, err := k.dialBack(ctx, c)
	k.lock()
	defer k.unlock()
	if err != nil {
		delete(p.clients, resource)
		delete(p.connections, c)
		_ = c.connection.Close()
		return err
	}
	if options.PreStartRequired {
		k.violation("%s: asks for PreStartContainer, which this kubelet never calls", resource)
	}
	p.endpoints[resource] = &endpoint{client: c, options: options}
	k.counter(resource).Socket = filepath.Base(path)
	p.goroutines.Go(func() { k.runClient(p, c) })
	return nil
}

func (k *Kubelet) dialBack(ctx context.Context, c *client) (*api.DevicePluginOptions, error) {
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

// client is a connection to a plugin, with at most one stream.
type client struct {
	resource   string
	connection *grpc.ClientConn
	plugin     api.DevicePluginClient
	// streaming is true while the client's stream is counted as live.
	streaming bool
	// dropped is true if DropStream has disconnected the client. The end of its stream must then
	// not disconnect the next client.
	dropped bool
}

// endpoint calls a resource's plugin (cm/devicemanager/endpoint.go).
type endpoint struct {
	// client and options are nil for an endpoint known only from the checkpoint.
	client  *client
	options *api.DevicePluginOptions
	// stopped is the time at which the endpoint stopped; zero while it runs.
	stopped time.Time
}

// dial blocks until the plugin answers or ctx ends. It keeps trying while no process serves the
// socket.
func (c *client) dial(ctx context.Context) error {
	c.connection.Connect()
	for {
		state := c.connection.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Shutdown:
			return errors.New("connection closed")
		}
		if !c.connection.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
	}
}

// runClient reads the client's stream and, when that ends, disconnects the resource's current
// client. As in the real kubelet, that can be a newer one (devicemanager/plugin/v1beta1/handler.go,
// 1.36.3).
func (k *Kubelet) runClient(p *process, c *client) {
	k.listAndWatch(p, c)
	k.lock()
	defer k.unlock()
	if current := p.clients[c.resource]; current != nil && !c.dropped {
		k.disconnect(p, current)
	}
}

// disconnect closes the resource's client and makes its devices unhealthy. The
// checkpoint is not written: it keeps the old health until the next list or
// allocation. The caller holds the lock.
func (k *Kubelet) disconnect(p *process, c *client) {
	_ = c.connection.Close()
	k.streamClosed(c)
	delete(p.clients, c.resource)
	delete(p.connections, c)
	if endpoint := p.endpoints[c.resource]; endpoint != nil {
		if devices := p.devices[c.resource]; devices != nil {
			devices.healthy, devices.unhealthy = idSet{}, devices.unhealthy.Union(devices.healthy)
		}
		endpoint.stopped = k.options.Now()
	}
	k.logger.Info("plugin disconnected", "resource", c.resource)
}

// listAndWatch reads the client's lists until its stream ends. It never opens another stream.
func (k *Kubelet) listAndWatch(p *process, c *client) {
	// The kubelet sets no deadline; closing the connection ends the stream.
	stream, err := c.plugin.ListAndWatch(context.Background(), &api.Empty{})
	if err != nil {
		k.logger.Info("stream not opened", "resource", c.resource, "error", err)
		return
	}
	k.streamOpened(c)
	defer func() {
		k.lock()
		defer k.unlock()
		k.streamClosed(c)
	}()
	for {
		k.options.OnRead(p.stopping)
		list, err := stream.Recv()
		if err != nil {
			k.options.OnRead(p.stopping)
			k.logger.Info("stream ended", "resource", c.resource, "error", err)
			if status.Code(err) == codes.ResourceExhausted {
				k.lock()
				k.violation("%s: list over 4 MiB: the kubelet drops the stream: %v", c.resource, err)
				k.unlock()
			}
			return
		}
		k.receiveList(p, c.resource, list.Devices)
	}
}

func (k *Kubelet) streamOpened(c *client) {
	k.lock()
	defer k.unlock()
	c.streaming = true
	counter := k.counter(c.resource)
	counter.StreamsOpened++
	counter.Streams++
	k.notify(Event{Kind: StreamOpened, Resource: c.resource})
	if counter.Streams > 1 && !k.options.AllowOverlap {
		k.violation("%s: %d live streams: the end of any disconnects the newest", c.resource, counter.Streams)
	}
}

// streamClosed counts the end of a stream once: when the kubelet closes the stream or when it sees
// that the stream has ended, whichever comes first. So a plugin that registers again at once is not
// reported for having two streams. The caller holds the lock.
func (k *Kubelet) streamClosed(c *client) {
	if c.streaming {
		c.streaming = false
		counter := k.counter(c.resource)
		counter.StreamsClosed++
		counter.Streams--
		k.notify(Event{
			Kind:      StreamEnded,
			Resource:  c.resource,
			ByKubelet: c.dropped,
		})
	}
}
