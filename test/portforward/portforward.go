// Package portforward is the server side of kubectl port-forward, for tests without an API server and a
// kubelet: a WebSocket, SPDY in it, and two streams for each connection.
package portforward

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	protocol "k8s.io/apimachinery/pkg/util/portforward"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// Serve answers a request for pods/portforward with a connection to one port of the pod, which dial opens.
// The client gets dial's error as from the kubelet, which writes it and resets both streams. Serve returns
// when the client or the pod has gone.
//
// The kubelet uses a stream while another goroutine still replies to it, so the reset of the data stream can
// arrive before the reply (k8s.io/cri-streaming, pkg/streaming/portforward/httpstream.go). Here it always does.
func Serve(w http.ResponseWriter, r *http.Request, dial func(port string) (net.Conn, error)) error {
	upgrader := websocket.Upgrader{Subprotocols: []string{protocol.WebsocketsSPDYTunnelingPortForwardV1}}
	socket, err := upgrader.Upgrade(w, r, nil)
	if err != nil {
		return err
	}
	streams := make(chan httpstream.Stream, 2)
	dialed := make(chan struct{})
	reply := sync.OnceFunc(func() { close(dialed) })
	defer reply()
	take := func(stream httpstream.Stream, _ <-chan struct{}) error {
		streams <- stream
		if stream.Headers().Get(corev1.StreamType) == corev1.StreamTypeData {
			<-dialed
		}
		return nil // The reply is sent now.
	}
	client, err := spdy.NewServerConnection(portforward.NewTunnelingConnection("server", socket), take)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	found := map[string]httpstream.Stream{}
	for len(found) < 2 {
		select {
		case stream := <-streams:
			found[stream.Headers().Get(corev1.StreamType)] = stream
		case <-client.CloseChan():
			return nil
		}
	}
	failures, data := found[corev1.StreamTypeError], found[corev1.StreamTypeData]
	if failures == nil || data == nil {
		return fmt.Errorf("streams %v, want one for data and one for errors", found)
	}
	pod, err := dial(data.Headers().Get(corev1.PortHeader))
	if err != nil {
		_, _ = fmt.Fprintln(failures, err)
		_, _ = data.Reset(), failures.Reset()
	} else {
		reply()
		var copying sync.WaitGroup
		copying.Go(func() { _, _ = io.Copy(pod, data) })
		gone := make(chan struct{})
		copying.Go(func() {
			_, _ = io.Copy(data, pod)
			close(gone)
		})
		select {
		case <-gone:
		case <-client.CloseChan():
		}
		_ = pod.Close()
		defer copying.Wait()
	}
	reply()
	_, _ = failures.Close(), data.Close()
	<-client.CloseChan() // It reads the rest first.
	return client.Close()
}

// Pipe is a connection to a server that serves only this one.
func Pipe(handler http.Handler) net.Conn {
	ours, theirs := net.Pipe()
	listener := &single{connections: make(chan net.Conn, 1)}
	listener.connections <- theirs
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: time.Minute,
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateClosed || state == http.StateHijacked {
				listener.end()
			}
		},
	}
	go func() { _ = server.Serve(listener) }() // It ends with the connection.
	return ours
}

// single is a listener with one connection.
type single struct {
	connections chan net.Conn
	once        sync.Once
}

func (s *single) end() { s.once.Do(func() { close(s.connections) }) }

// Accept returns the connection, and then an error when it has ended.
func (s *single) Accept() (net.Conn, error) {
	if connection, ok := <-s.connections; ok {
		return connection, nil
	}
	return nil, net.ErrClosed
}

// Close lets Accept return.
func (s *single) Close() error {
	s.end()
	return nil
}

// Addr is a placeholder.
func (*single) Addr() net.Addr { return &net.UnixAddr{Name: "single", Net: "unix"} }
