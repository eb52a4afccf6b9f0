//go:build cgo

package driver

import (
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/virgate/virgate/internal/nvml"
)

// library is the driver's library. Its methods may be called from any
// goroutine.
type library struct {
	options Options
	machine fs.FS

	// mu is for Init and Shutdown alone: one of them that the driver does not
	// answer holds it.
	mu sync.Mutex
	// known are the libraries loaded so far, by path.
	known map[string]*loaded
	// opened is NVML's count of Init less Shutdown; api, which is set when it is
	// not 0, is what the calls go to.
	opened int
	api    atomic.Pointer[gonvml.Interface]

	devices   table[gonvml.Device, nvml.Device]
	instances table[gonvml.GpuInstance, nvml.GPUInstance]
	computes  table[gonvml.ComputeInstance, nvml.ComputeInstance]
	sets      table[gonvml.EventSet, nvml.EventSet]
}

// Open returns the driver's library. It neither looks for it nor opens it: Init
// does, and answers LibraryNotFound with the places that it looked at, or
// NotSupported on WSL and Tegra systems. One library is of use in a process:
// the calls of all end in the one that was opened last.
func Open(options Options) (nvml.Library, error) {
	return &library{
		options: options, machine: os.DirFS(options.machine()), known: map[string]*loaded{},
	}, nil
}

// Init opens the driver; like NVML it counts.
func (l *library) Init() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.opened == 0 {
		if err := platform(l.machine); err != nil {
			return fmt.Errorf("%w: %w", failed("Init", gonvml.ERROR_NOT_SUPPORTED), err)
		}
		now, err := l.load()
		if err != nil {
			return fmt.Errorf("%w: %w", failed("Init", gonvml.ERROR_LIBRARY_NOT_FOUND), err)
		}
		now.use()
		if err := failed("Init", now.api.Init()); err != nil {
			return err
		}
		l.devices.reset()
		l.instances.reset()
		l.computes.reset()
		l.sets.reset()
		l.api.Store(&now.api)
		l.opened = 1
		return nil
	}
	if err := failed("Init", (*l.api.Load()).Init()); err != nil {
		return err
	}
	l.opened++
	return nil
}

// load finds the library and loads it, if it is not loaded yet.
func (l *library) load() (*loaded, error) {
	path, looked := find(l.options.roots())
	if path == "" {
		path = libraryName
	}
	if now := l.known[path]; now != nil {
		return now, nil
	}
	now, err := load(path)
	switch {
	case err != nil && path == libraryName:
		return nil, fmt.Errorf("no %s in %s, nor where the loader looks: %w", libraryName, strings.Join(looked, ", "), err)
	case err != nil:
		return nil, fmt.Errorf("load %s: %w", path, err)
	}
	l.known[path] = now
	return now, nil
}

// Shutdown takes back one Init. After the last one all handles are void, and
// the next Init looks for the library anew, also when the driver did not like to
// be closed: it may be one that was exchanged meanwhile.
func (l *library) Shutdown() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.opened == 0 {
		return failed("Shutdown", gonvml.ERROR_UNINITIALIZED)
	}
	err := failed("Shutdown", (*l.api.Load()).Shutdown())
	if l.opened--; l.opened == 0 {
		l.api.Store(nil)
	}
	return err
}

// failed is the error of a call; nil for SUCCESS.
func failed(call string, code gonvml.Return) error {
	if code == gonvml.SUCCESS {
		return nil
	}
	return &nvml.Error{Call: call, Return: nvml.Return(code)}
}
