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

// loaded is a library in this process. It is never unloaded: a call that the
// driver does not answer may be in it for ever, and versions are few.
type loaded struct {
	// path is what it was loaded by.
	path   string
	api    gonvml.Interface
	handle unsafe.Pointer
}

// load maps the library of that path, or of that name where the loader looks.
// The error is the loader's.
func load(path string) (*loaded, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	runtime.LockOSThread() // The loader keeps its last error by thread.
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

// use makes it the library that go-nvml's calls end in.
func (l *loaded) use() { C.virgate_forward(l.handle) }
