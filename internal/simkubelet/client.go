package simkubelet

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// client is a connection to a plugin, with at most one stream.
type client struct {
	resource   string
	connection *grpc.ClientConn
	plugin     api.DevicePluginClient
	// streaming says that a stream is counted as live.
	streaming bool
	// dropped says that DropStream has disconnected the client, so that the end
	// of its stream is not to be answered again, with a newer client.
	dropped bool
}

// endpoint is where a resource's calls go.
type endpoint struct {
	// client is nil for an endpoint that is known from the checkpoint only.
	client *client
	// options are nil likewise.
	options *api.DevicePluginOptions
	// stopped is when the endpoint ended; zero while it lives.
	stopped time.Time
}

// newClient leaves gRPC's limit of 4 MiB a message as it is: the kubelet does.
func newClient(resource, path string) (*client, error) {
	connection, err := grpc.NewClient("passthrough:///plugin",
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}))
	if err != nil {
		return nil, err
	}
	return &client{resource: resource, connection: connection, plugin: api.NewDevicePluginClient(connection)}, nil
}

// dial blocks until the plugin answers or ctx ends; a socket that nobody serves
// is tried until then.
func (c *client) dial(ctx context.Context) error {
	c.connection.Connect()
	for {
		state := c.connection.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Shutdown:
			return errShutdown
		}
		if !c.connection.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
	}
}

// close may be called more than once.
func (c *client) close() { _ = c.connection.Close() }

// runClient watches the client's stream and, when that ends, disconnects
// whichever client the resource has by then. That this can be another one is
// the real kubelet's doing (devicemanager/plugin/v1beta1/handler.go, 1.36.3).
func (k *Kubelet) runClient(p *process, c *client) {
	k.watch(p, c)
	k.lock()
	defer k.unlock()
	if current := p.clients[c.resource]; current != nil && !c.dropped {
		k.disconnect(p, current)
	}
}

// disconnect closes the resource's client and makes its devices unhealthy. The
// checkpoint is not written: it tells the old health until the next list or
// allocation. The caller holds the lock.
func (k *Kubelet) disconnect(p *process, c *client) {
	c.close()
	k.countClosed(c)
	delete(p.clients, c.resource)
	delete(p.connections, c)
	if endpoint := p.endpoints[c.resource]; endpoint != nil {
		if devices := p.devices[c.resource]; devices != nil {
			devices.makeUnhealthy()
		}
		endpoint.stopped = k.options.Now()
	}
	k.logger.Info("plugin disconnected", "resource", c.resource)
}

// watch reads the client's lists until its stream ends. It never tries again.
func (k *Kubelet) watch(p *process, c *client) {
	// The kubelet sets no deadline; closing the connection ends the stream.
	stream, err := c.plugin.ListAndWatch(context.Background(), &api.Empty{})
	if err != nil {
		k.logger.Info("stream not opened", "resource", c.resource, "error", err)
		return
	}
	k.streamOpened(c)
	defer k.streamClosed(c)
	for {
		if !k.dawdle(p) {
			return
		}
		list, err := stream.Recv()
		if err != nil {
			k.dawdle(p)
			k.logger.Info("stream ended", "resource", c.resource, "error", err)
			if status.Code(err) == codes.ResourceExhausted {
				k.lock()
				k.violate("%s: list over 4 MiB: the kubelet drops the stream: %v", c.resource, err)
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
	counter.streamsOpened++
	k.tell(Event{Kind: StreamOpened, Resource: c.resource})
	if live := counter.streamsOpened - counter.streamsClosed; live > 1 && !k.options.AllowOverlap {
		k.violate("%s: %d live streams: the end of any disconnects the newest", c.resource, live)
	}
}

func (k *Kubelet) streamClosed(c *client) {
	k.lock()
	defer k.unlock()
	k.countClosed(c)
}

// countClosed counts a stream's end once: when the kubelet closes it, so that a
// plugin that registers at once is not blamed for two, or when it is seen to
// have ended. The caller holds the lock.
func (k *Kubelet) countClosed(c *client) {
	if c.streaming {
		c.streaming = false
		k.counter(c.resource).streamsClosed++
		k.tell(Event{Kind: StreamEnded, Resource: c.resource, ByKubelet: c.dropped})
	}
}
