package simkubelet

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const socketName = "kubelet.sock"

// process is one life of the kubelet, from Start to Stop. The fields below
// servers are its memory, guarded by Kubelet.mu.
type process struct {
	// goroutines counts all that end with the process but gRPC handlers, for
	// which the servers wait.
	goroutines sync.WaitGroup
	stopping   chan struct{}
	servers    []*grpc.Server

	// clients are the plugins whose end the kubelet would notice, by resource:
	// one each, however many streams there are.
	clients map[string]*client
	// connections are all clients, also those that nothing refers to any more.
	connections map[*client]struct{}
	endpoints   map[string]*endpoint
	devices     map[string]*devices
	ledger      ledger
	// allocated are the devices that are not to be given again: those of the
	// ledger and those of an admission under way, by resource.
	allocated map[string]set
	// admitting are the devices of the admission under way alone.
	admitting map[string]set
	// known are the UIDs of the pods that this process has heard of.
	known set
	// sourcesReady says that it has heard of all pods of the time before it.
	sourcesReady bool
}

func newProcess() *process {
	return &process{
		stopping:    make(chan struct{}),
		clients:     map[string]*client{},
		connections: map[*client]struct{}{},
		endpoints:   map[string]*endpoint{},
		devices:     map[string]*devices{},
		ledger:      ledger{},
		allocated:   map[string]set{},
		admitting:   map[string]set{},
		known:       set{},
	}
}

// startProcess brings a process up in the order of the kubelet: checkpoint,
// wipe, socket. A plugin that sees kubelet.sock created may rely on the wipe
// being over.
func (k *Kubelet) startProcess() (*process, error) {
	p := newProcess()
	if err := os.MkdirAll(k.options.Dir, 0o750); err != nil {
		return nil, err
	}
	if err := p.readCheckpoint(k.options.Dir, k.options.Now()); err != nil {
		return nil, err
	}
	if err := wipeSockets(k.options.Dir); err != nil {
		return nil, err
	}

	var listeners []net.Listener
	listen := func(path string, register func(*grpc.Server), options ...grpc.ServerOption) error {
		listener, err := listenUnix(path)
		if err != nil {
			return err
		}
		server := grpc.NewServer(append(options, grpc.WaitForHandlers(true))...)
		register(server)
		listeners, p.servers = append(listeners, listener), append(p.servers, server)
		return nil
	}
	var podResourcesErr error
	if path := k.options.PodResourcesSocket; path != "" {
		podResourcesErr = listen(path, func(s *grpc.Server) {
			podresources.RegisterPodResourcesListerServer(s, &podResourcesServer{kubelet: k, process: p})
		}, grpc.UnaryInterceptor(limitRate()))
	}
	registrationErr := listen(filepath.Join(k.options.Dir, socketName), func(s *grpc.Server) {
		api.RegisterRegistrationServer(s, &registrationServer{kubelet: k, process: p})
	})
	if err := errors.Join(podResourcesErr, registrationErr); err != nil {
		for _, listener := range listeners {
			_ = listener.Close()
		}
		return nil, err
	}

	k.lock()
	k.process = p
	k.tell(Event{Kind: Started})
	k.unlock()
	for i, server := range p.servers {
		p.goroutines.Go(func() {
			if err := server.Serve(listeners[i]); err != nil {
				k.logger.Error("server ended", "error", err)
			}
		})
	}
	p.goroutines.Go(func() { k.reportStatus(p) })
	return p, nil
}

// end breaks all connections and waits for the process's goroutines.
func (k *Kubelet) end(p *process) {
	close(p.stopping)
	k.lock()
	for client := range p.connections {
		client.close()
	}
	k.unlock()
	for _, server := range p.servers {
		server.Stop()
	}
	// A Register that was being answered may have added a connection.
	k.lock()
	for client := range p.connections {
		client.close()
	}
	k.unlock()
	p.goroutines.Wait()
}

// wipeSockets removes the sockets directly in dir, whosever they are. Regular
// files and sub-directories stay.
func wipeSockets(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Type()&fs.ModeSocket == 0 {
			continue
		}
		if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// listenUnix makes a socket whose file outlives the listener, as it does when a
// process is killed.
func listenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	return listener, nil
}
