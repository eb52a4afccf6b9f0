package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// GPUs are a node's GPUs with their environment.
type GPUs struct {
	// Library has deadlines already; see nvml.WithDeadlines.
	Library nvml.Library
	// Name is the value of --node.
	Name string
	// Proc is the /proc of the processes that use them.
	Proc fs.FS
	// Containers maps processes to containers; nil leaves that to Options.Pods.
	Containers usage.Containers
	// CDI makes the CDI specs; nil for those of NVIDIA's driver.
	CDI cdi.Source
	// Control answers below /sim/ on the control socket; nil for none.
	Control http.Handler
	// Reset resets the GPU with that PCI bus ID, which this program must have closed.
	Reset func(ctx context.Context, busID string) error
	// Persistence reports whether the GPU is in persistence mode; SetPersistence turns the mode on
	// or off. They are nil if Reset is.
	Persistence    func(ctx context.Context, busID string) (bool, error)
	SetPersistence func(ctx context.Context, busID string, on bool) error
	// SetTimeSlice sets the time slice of the GPU with that UUID.
	SetTimeSlice func(ctx context.Context, gpu string, slice sharing.TimeSlice) error
	// MakeNodes makes the device nodes for these capability files of the driver; nil if there are
	// no such nodes.
	MakeNodes func(ctx context.Context, files []string) error
	Close     func()
	// ProcessesHidden is true if the driver does not list processes of other PID namespaces.
	ProcessesHidden bool
	// DriverReplaced returns an error when the node's driver is no longer the one that this
	// container was given, and nil when ctx ends; nil if that cannot be found out.
	DriverReplaced func(ctx context.Context) error
	// Kernel provides what the machine's kernel knows about the driver; nil if it is not used.
	Kernel nvml.Kernel
	// NotPermitted reports whether the driver certainly refuses to partition GPUs; nil if it does
	// not.
	NotPermitted func() bool
}

// Partitioner returns the nvml.Partitioner for the GPUs.
func (g GPUs) Partitioner(
	pauseEvents func(ctx context.Context, gpu string) (resume func(), err error),
) *nvml.Partitioner {
	p := nvml.NewPartitioner(g.Library, pauseEvents)
	p.ProcessesHidden, p.NotPermitted = g.ProcessesHidden, g.NotPermitted
	p.Clients = func(minor int) ([]string, error) { return usage.Clients(g.Proc, minor) }
	return p
}

// containers returns what maps processes to containers; nil if nothing does.
func (g GPUs) containers(pods *configsource.Pods) usage.Containers {
	if g.Containers == nil && pods != nil {
		return pods
	}
	return g.Containers
}

// Simulated returns the GPUs of a simulated node, which knows its own processes and containers. The
// library is the node itself or wraps it.
func Simulated(node *simnode.Node, library nvml.Library) GPUs {
	return GPUs{
		Library:        nvml.WithDeadlines(library, nvml.Limits{}),
		Name:           node.Name(),
		Proc:           node.Proc(),
		Containers:     node,
		CDI:            cdi.Simulated{},
		Control:        node.Handler(),
		Reset:          func(_ context.Context, busID string) error { return node.ResetGPU(busID) },
		Persistence:    func(_ context.Context, busID string) (bool, error) { return node.Persistence(busID) },
		SetPersistence: func(_ context.Context, busID string, on bool) error { return node.SetPersistence(busID, on) },
		SetTimeSlice: func(_ context.Context, gpu string, slice sharing.TimeSlice) error {
			return node.SetTimeSlice(gpu, slice)
		},
		Close:           func() {},
		Kernel:          node,
		ProcessesHidden: node.OwnPIDs(),
		NotPermitted:    func() bool { return !node.MayChangeMIG() },
	}
}

// driverOptions finds the driver as NVIDIA's plugin does: where it is mounted in this program's
// container, else where it is on the host.
func driverOptions(startup configs.StartupSettings, hostRoot string, log *slog.Logger) cdi.DriverOptions {
	options := cdi.DriverOptions{
		Find: func() cdi.Roots {
			roots := cdi.Roots{Driver: startup.DriverRoot, Dev: "/"}
			if isDirectory(startup.ContainerDriverRoot) {
				roots.Driver = startup.ContainerDriverRoot
			}
			if isDirectory(filepath.Join(roots.Driver, "dev")) {
				roots.Dev = roots.Driver
			}
			return roots
		},
		Host:         cdi.Roots{Driver: startup.DriverRoot, Dev: startup.DevRoot},
		Mounts:       func() []cdi.Mount { return hostMounts(startup, hostRoot) },
		Capabilities: Capabilities(startup, hostRoot),
		HookPath:     hookPath(startup, hostRoot),
		Logger:       log,
	}
	if startup.CDIFeatures != "" {
		options.Features = strings.Split(startup.CDIFeatures, ",")
	}
	if startup.CDIDisableHooks != "" {
		options.DisabledHooks = strings.Split(startup.CDIDisableHooks, ",")
	}
	return options
}

// hostMounts returns the folders of the host that this process sees.
func hostMounts(startup configs.StartupSettings, hostRoot string) (mounts []cdi.Mount) {
	if filepath.Join("/", hostRoot) != "/" {
		mounts = append(mounts, cdi.Mount{Host: "/", Here: hostRoot})
	}
	if isDirectory(startup.ContainerDriverRoot) {
		mounts = append(mounts, cdi.Mount{
			Host: filepath.Join("/", startup.DriverRoot),
			Here: startup.ContainerDriverRoot,
		})
	}
	if mounts == nil {
		return []cdi.Mount{{Host: "/", Here: "/"}}
	}
	return mounts
}

// Capabilities reads the driver's MIG capability files where this process sees all of them: in the
// container's own /proc, NVIDIA's runtime may hide some.
func Capabilities(startup configs.StartupSettings, hostRoot string) migcaps.Reader {
	var roots []string
	for _, root := range []string{hostRoot, startup.ContainerDriverRoot} {
		if root != "" {
			roots = append(roots, root)
		}
	}
	return migcaps.NewReader(roots...)
}

// mountedDev returns where this process sees the folder whose dev has the containers' device nodes,
// if that is the driver root, which is mounted into this container. Otherwise it returns "".
func mountedDev(startup configs.StartupSettings) string {
	if filepath.Join("/", startup.DevRoot) != filepath.Join("/", startup.DriverRoot) {
		return ""
	}
	return startup.ContainerDriverRoot
}

// hookPath returns the program on the host that CDI specs name as their hook. NVIDIA's container
// toolkit has nvidia-cdi-hook from 1.16 on, and nvidia-ctk, the default of NVIDIA's plugin, in all
// relevant releases. If neither is seen, the host's files are not mounted here.
func hookPath(startup configs.StartupSettings, hostRoot string) string {
	if startup.CDIHookPath != "" {
		return startup.CDIHookPath
	}
	const newer, older = "/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-ctk"
	roots := []string{cmp.Or(hostRoot, "/")}
	if startup.DriverRoot == "/" { // If mounted, it has the whole host.
		roots = append(roots, startup.ContainerDriverRoot)
	}
	for _, root := range roots {
		// A link must be followed on the host, not in this container.
		if _, err := os.Lstat(filepath.Join(root, newer)); err == nil {
			return newer
		}
	}
	return older
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// nodeLock is the right to serve a device-plugins directory. If two programs run on a node, the
// second one stands by until the first has ended.
type nodeLock struct {
	dir  string
	file *state.File
	log  *slog.Logger
	lock *state.Lock
}

// acquire waits for the right and takes over what the last program left.
func (l *nodeLock) acquire(ctx context.Context, standBy func()) error {
	lock, err := state.Acquire(ctx, l.dir, func(err error) {
		switch {
		case errors.Is(err, state.ErrLocked):
			l.log.Info("standing by", "because", err)
			standBy()
		case errors.Is(err, os.ErrNotExist):
			l.log.Warn("waiting for the kubelet to make its directory", "dir", l.dir)
		default:
			l.log.Error("node not claimed, trying again", "error", err)
		}
	})
	if err != nil {
		return err
	}
	l.lock = lock
	l.file.Load()
	if err := plugin.RemoveSockets(l.dir); err != nil {
		l.log.Warn("old sockets not removed", "error", err)
	}
	l.log.Info("serving this node", "dir", l.dir)
	return nil
}

func (l *nodeLock) release() {
	if l.lock == nil {
		return
	}
	if err := l.lock.Release(); err != nil {
		l.log.Warn("lock not released", "error", err)
	}
	l.lock = nil
}

// leave gives up the right. If there is no successor, it calls say before one can start.
func (l *nodeLock) leave(say func()) {
	l.release()
	if last, ok := state.AcquireLast(l.dir); ok {
		l.lock = last
		say()
		l.release()
	}
}

// listenControl listens on a Unix socket that only its owner can use. It replaces the socket of a
// program that has ended, but not of a running one.
func listenControl(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if connection, err := net.Dial("unix", path); err == nil {
		_ = connection.Close()
		return nil, fmt.Errorf("control socket %s: another program listens there", path)
	} else if !errors.Is(err, os.ErrNotExist) {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("control socket: %w", err)
		}
	}
	// The mode is set before the file exists, so no other user can ever connect.
	config := net.ListenConfig{Control: func(_, _ string, socket syscall.RawConn) error {
		var failed error
		err := socket.Control(func(fd uintptr) { failed = syscall.Fchmod(int(fd), 0o600) })
		return errors.Join(err, failed)
	}}
	listener, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return listener, nil
}

// controlHandler serves the control socket of a running program: health, releases of GPUs, and the
// controls of simulated GPUs.
func controlHandler(health web.Health, releases, gpus http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/health", web.HealthHandler(health))
	mux.Handle("/health/", web.HealthHandler(health))
	mux.Handle("/gpu", releases)
	mux.Handle("/gpu/", releases)
	if gpus != nil {
		mux.Handle("/sim/", gpus)
	}
	return mux
}
