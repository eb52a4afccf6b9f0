//go:build cgo

package driver

/*
#cgo linux LDFLAGS: -ldl
#include <stdlib.h>

void *virgate_load(const char *path, const char **why);
void virgate_forward(void *library);
*/
import "C"

import (
	"errors"
	"runtime"
	"unsafe"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// loaded is a library in this process. It is never unloaded, because a call that the driver does
// not answer may stay in it forever, and there are few versions.
type loaded struct {
	// path is the path with which it was loaded.
	path   string
	api    gonvml.Interface
	handle unsafe.Pointer
}

// load loads the library with that path, or with that name from where the dynamic loader searches.
// The error is the loader's.
func load(path string) (*loaded, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	runtime.LockOSThread() // The loader keeps its last error per thread.
	defer runtime.UnlockOSThread()
	var why *C.char
	handle := C.virgate_load(name, &why)
	if handle == nil {
		return nil, errors.New(C.GoString(why))
	}
	return &loaded{
		path:   path,
		api:    gonvml.New(gonvml.WithLibraryPath(path)),
		handle: handle,
	}, nil
}

// use directs go-nvml's calls to this library.
func (l *loaded) use() { C.virgate_forward(l.handle) }
