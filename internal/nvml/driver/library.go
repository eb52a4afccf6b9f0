//go:build cgo

package driver

import (
	"cmp"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/virgate/virgate/internal/driverroot"
	"github.com/virgate/virgate/internal/nvml"
)

// library is the driver's library. Its methods may be called from any goroutine.
type library struct {
	options Options
	machine fs.FS

	// mu is for Init and Shutdown only, because a hung one keeps holding it.
	mu sync.Mutex
	// known holds the libraries loaded so far, by path.
	known map[string]*loaded
	// opened counts as NVML does: calls of Init minus calls of Shutdown. api gets the calls; it is
	// nil while opened is 0.
	opened int
	api    atomic.Pointer[gonvml.Interface]

	devices   table[gonvml.Device, nvml.Device]
	instances table[gonvml.GpuInstance, nvml.GPUInstance]
	computes  table[gonvml.ComputeInstance, nvml.ComputeInstance]
	sets      table[gonvml.EventSet, nvml.EventSet]
}

// Open returns the driver's library without searching for it. Init finds and opens it. Init fails
// with LibraryNotFound and the places it searched, or with NotSupported on WSL and Tegra systems. A
// process can use only one library: all calls go to the library that was opened last.
func Open(options Options) (nvml.Library, error) {
	return &library{
		options: options,
		machine: os.DirFS(cmp.Or(options.MachineRoot, "/")),
		known:   map[string]*loaded{},
	}, nil
}

// Init opens the driver, and counts its calls as NVML does.
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
		if code := now.api.Init(); code == gonvml.ERROR_LIB_RM_VERSION_MISMATCH {
			return mismatch(libraryVersion(now.path), moduleVersion(l.machine))
		} else if code != gonvml.SUCCESS {
			return failed("Init", code)
		}
		l.devices.reset()
		l.instances.reset()
		l.computes.reset()
		l.sets.reset()
		l.api.Store(&now.api)
	} else if err := failed("Init", (*l.api.Load()).Init()); err != nil {
		return err
	}
	l.opened++
	return nil
}

// load finds the library, and loads it unless it is already loaded.
func (l *library) load() (*loaded, error) {
	path := libraryName
	in, file, looked := find(l.options.roots(), driverroot.LibraryFolders(), libraryName)
	if file != "" { // The loader identifies libraries by path, so each version of a driver needs its own.
		path = filepath.Join(in.path, file)
	}
	if now := l.known[path]; now != nil {
		return now, nil
	}
	now, err := load(path)
	switch {
	case err != nil && path == libraryName:
		return nil, fmt.Errorf("no %s in %s, nor where the loader looks: %w", libraryName, strings.Join(looked, ", "),
			err)
	case err != nil:
		return nil, fmt.Errorf("load %s: %w", path, err)
	}
	l.known[path] = now
	return now, nil
}

// mismatch returns the error for a driver that finds a kernel module of another version. If the two
// versions are equal, the module's is out of date and is left out.
func mismatch(libraries, module string) error {
	if module == libraries {
		module = ""
	}
	return &nvml.VersionMismatch{Libraries: libraries, Module: module}
}

// Shutdown undoes one Init. After the last Shutdown all handles are invalid, and the next Init
// searches for the library again, even if closing the driver failed: the library may have been
// replaced meanwhile.
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

// failed returns the error of a call; nil for SUCCESS.
func failed(name string, code gonvml.Return) error {
	if code == gonvml.SUCCESS {
		return nil
	}
	return &nvml.Error{Call: name, Return: nvml.Return(code)}
}

// callLibrary makes a call that needs no handle.
func callLibrary[T any](l *library, name string, get func(gonvml.Interface) (T, gonvml.Return)) (T, error) {
	var nothing T
	api := l.api.Load()
	if api == nil {
		return nothing, failed(name, gonvml.ERROR_UNINITIALIZED)
	}
	value, code := get(*api)
	if err := failed(name, code); err != nil {
		return nothing, err
	}
	return value, nil
}

// call makes a call for the handle with that number. For an unknown number it returns
// InvalidArgument, as the driver does for a handle that it never gave.
func call[Handle comparable, Number ~uint64, T any](
	l *library,
	name string,
	things *table[Handle, Number],
	number Number,
	get func(Handle) (T, gonvml.Return),
) (T, error) {
	return callLibrary(l, name, func(gonvml.Interface) (nothing T, _ gonvml.Return) {
		thing, known := things.handle(number)
		if !known {
			return nothing, gonvml.ERROR_INVALID_ARGUMENT
		}
		return get(thing)
	})
}

// free makes the call that frees the object with that number, and forgets the handle: the driver
// may reuse it for a new object.
func free[Handle comparable, Number ~uint64](
	l *library,
	name string,
	things *table[Handle, Number],
	number Number,
	do func(Handle) gonvml.Return,
) error {
	_, err := call(l, name, things, number, func(handle Handle) (struct{}, gonvml.Return) {
		code := do(handle)
		if code == gonvml.SUCCESS {
			things.forget(number)
		}
		return struct{}{}, code
	})
	return err
}

// callWith is call with an argument, which becomes part of the name in an error. If the argument
// does not fit the driver's unsigned 32 bits, it returns InvalidArgument.
func callWith[Handle comparable, Number ~uint64, T any](
	l *library, name string, things *table[Handle, Number], number Number, argument int,
	get func(Handle, int) (T, gonvml.Return),
) (T, error) {
	return call(l, with(name, argument), things, number, func(thing Handle) (nothing T, _ gonvml.Return) {
		if !ordinal(argument) {
			return nothing, gonvml.ERROR_INVALID_ARGUMENT
		}
		return get(thing, argument)
	})
}

// with adds the argument of a call to its name.
func with(name string, argument int) string { return fmt.Sprintf("%s(%d)", name, argument) }

// ordinal reports whether the number can be passed to the driver.
func ordinal(number int) bool { return number >= 0 && number <= math.MaxInt32 }

// numbered converts the handle that a call returned into its number.
func (t *table[Handle, Number]) numbered(handle Handle, err error) (Number, error) {
	if err != nil {
		return 0, err
	}
	return t.number(handle), nil
}

// allNumbered is numbered for a list of handles.
func (t *table[Handle, Number]) allNumbered(handles []Handle, err error) (list []Number, _ error) {
	for _, handle := range handles {
		list = append(list, t.number(handle))
	}
	return list, err
}

func callDevice[T any](l *library, name string, d nvml.Device, get func(gonvml.Device) (T, gonvml.Return)) (T, error) {
	return call(l, name, &l.devices, d, get)
}
