package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/spdystream"
	corev1 "k8s.io/api/core/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	protocol "k8s.io/apimachinery/pkg/util/portforward"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/transport/websocket"
	"k8s.io/streaming/pkg/httpstream"
)

// forwarder opens connections to ports on the loopback of pods, as kubectl port-forward does: the
// API server authorizes each connection and the kubelet makes it. It has no listener that others on
// this machine could use.
type forwarder struct {
	api       rest.Interface
	transport *transport.Config
	tls       *tls.Config
	proxy     func(*http.Request) (*url.URL, error)
}

func newForwarder(config *rest.Config, api rest.Interface) (*forwarder, error) {
	f := &forwarder{api: api, proxy: config.Proxy}
	if f.proxy == nil {
		f.proxy = utilnet.NewProxierWithNoProxyCIDR(http.ProxyFromEnvironment)
	}
	var err error
	f.transport, err = config.TransportConfig()
	if err != nil {
		return nil, err
	}
	f.tls, err = transport.TLSConfigFor(f.transport)
	if err != nil {
		return nil, err
	}
	if f.tls != nil { // Each pod needs its own connection; only the first needs a full handshake.
		f.tls.ClientSessionCache = tls.NewLRUClientSessionCache(0)
	}
	return f, nil
}

// open opens a connection to the pod's status port, until ctx ends.
func (f *forwarder) open(ctx context.Context, pod Pod) (io.ReadWriteCloser, error) {
	// As in websocket.RoundTripperFor, which cannot cache TLS sessions.
	upgrade := &websocket.RoundTripper{
		TLSConfig: f.tls,
		Proxier:   f.proxy,
	}
	wrapped, err := transport.HTTPWrappersForConfig(f.transport, upgrade)
	if err != nil {
		return nil, err
	}
	address := f.api.Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).
		SubResource("portforward").URL()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return nil, err
	}
	socket, err := websocket.Negotiate(wrapped, upgrade, request, protocol.WebsocketsSPDYTunnelingPortForwardV1)
	if failed, ok := errors.AsType[*httpstream.UpgradeFailureError](err); ok {
		err = failed.Cause
	}
	if err != nil {
		return nil, err
	}
	tunnel := portforward.NewTunnelingConnection("client", socket)
	stop := context.AfterFunc(ctx, func() { _ = tunnel.Close() })
	opened, err := forward(tunnel, pod.StatusPort)
	if err != nil {
		stop()
		_ = tunnel.Close()
		return nil, err
	}
	opened.stop = stop
	return opened, nil
}

// forwarded is a connection to a pod's port. If the kubelet could not connect, Read returns why.
type forwarded struct {
	data, failures *spdystream.Stream
	failure        <-chan error
	tunnel         net.Conn
	serving        *sync.WaitGroup
	stop           func() bool
}

// forward makes the kubelet connect to a port. The kubelet reports errors on a stream of their own.
// Client-go's httpstream is not used, because it waits up to 30 s for each stream even if the
// connection has ended.
func forward(tunnel net.Conn, port int32) (*forwarded, error) {
	connection, err := spdystream.NewConnection(tunnel, false)
	if err != nil {
		return nil, err
	}
	f := &forwarded{
		tunnel:  tunnel,
		serving: new(sync.WaitGroup),
	}
	served := make(chan struct{})
	f.serving.Go(func() {
		defer close(served)
		connection.Serve(spdystream.NoOpStreamHandler)
	})
	// A kubelet that cannot connect may reset a stream before it replies to it. Spdystream then
	// waits until somebody takes the reply, and Serve never returns if nobody does
	// (handleResetFrame in connection.go).
	takeReply := func(stream *spdystream.Stream) {
		for errors.Is(stream.WaitTimeout(replyPause), spdystream.ErrTimeout) {
			select {
			case <-served:
				return
			default:
			}
		}
	}
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(int(port)))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	f.failures, err = connection.CreateStream(headers, nil, true) // Nothing is written to it.
	if err != nil {
		return nil, err
	}
	f.serving.Go(func() { takeReply(f.failures) })
	headers = headers.Clone()
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	f.data, err = connection.CreateStream(headers, nil, false)
	if err != nil {
		return nil, err
	}
	f.serving.Go(func() { takeReply(f.data) })
	failure := make(chan error, 1)
	f.failure = failure
	f.serving.Go(func() {
		defer close(failure)
		if text, _ := io.ReadAll(io.LimitReader(f.failures, maxFailure)); len(text) > 0 {
			failure <- fmt.Errorf("the kubelet cannot connect: %s", strings.TrimSpace(string(text)))
		}
	})
	return f, nil
}

// replyPause is how often a stream without a reply is checked for the end of its connection.
const replyPause = 100 * time.Millisecond

// maxFailure limits how much of the kubelet's error is read, in bytes.
const maxFailure = 4 << 10

func (f *forwarded) Read(into []byte) (int, error) {
	n, err := f.data.Read(into)
	if n == 0 && err != nil {
		if why := <-f.failure; why != nil { // The end of the connection closes f.failure, too.
			return 0, why
		}
	}
	return n, err
}

func (f *forwarded) Write(data []byte) (int, error) { return f.data.Write(data) }

func (f *forwarded) Close() error {
	f.stop()
	err := f.tunnel.Close()
	_, _ = f.data.Reset(), f.failures.Reset() // Otherwise Serve waits until the rest is read.
	f.serving.Wait()
	return err
}
