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

// process is the kubelet from one Start to the next Stop. The fields below servers
// are its memory, guarded by Kubelet.mu.
type process struct {
	// goroutines are all goroutines of the process except gRPC's handlers; the servers wait for
	// those.
	goroutines sync.WaitGroup
	stopping   chan struct{}
	servers    []*grpc.Server

	// clients maps each resource to its one client, however many streams there are.
	clients map[string]*client
	// connections has all clients, including those that have been replaced in clients.
	connections map[*client]struct{}
	endpoints   map[string]*endpoint
	devices     map[string]*deviceList
	podDevices  podDevices
	// admitting maps resources to the devices of the admission in progress.
	admitting map[string]idSet
	// knownPods are the UIDs of the pods that this process has heard of.
	knownPods idSet
	// sourcesReady is true once the process has heard of all pods of earlier processes.
	sourcesReady bool
}

func newProcess() *process {
	return &process{
		stopping:    make(chan struct{}),
		clients:     map[string]*client{},
		connections: map[*client]struct{}{},
		endpoints:   map[string]*endpoint{},
		devices:     map[string]*deviceList{},
		podDevices:  podDevices{},
		admitting:   map[string]idSet{},
		knownPods:   idSet{},
	}
}

// startProcess does the same as a kubelet, in the same order: it reads the checkpoint, removes all
// sockets, and creates kubelet.sock. A plugin that sees a new kubelet.sock may create its own.
func (k *Kubelet) startProcess() error {
	p := newProcess()
	if err := os.MkdirAll(k.options.Dir, 0o750); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(k.options.Dir, checkpointName))
	if err == nil {
		err = p.restoreCheckpoint(text, k.options.Now())
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := wipeSockets(k.options.Dir); err != nil {
		return err
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
		return err
	}

	k.lock()
	k.process = p
	k.notify(Event{Kind: Started})
	k.unlock()
	for i, server := range p.servers {
		p.goroutines.Go(func() {
			if err := server.Serve(listeners[i]); err != nil {
				k.logger.Error("server ended", "error", err)
			}
		})
	}
	p.goroutines.Go(func() { k.reportStatus(p) })
	return nil
}

func (k *Kubelet) closeConnections(p *process) {
	k.lock()
	defer k.unlock()
	for client := range p.connections {
		_ = client.connection.Close() // It may be closed already.
	}
}

// wipeSockets removes all sockets directly in dir, whichever process made them. Regular files and
// subdirectories stay.
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

// listenUnix makes a socket whose file stays when the listener is closed, as when a process is
// killed.
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
