// Command cudaclient is a CUDA program for TestMPS in test/gpu. Its arguments are two sizes in
// bytes. It allocates memory of the first size on the first GPU, tries to allocate the second, and
// prints what it has of the GPU as a line of JSON. It ends when its standard input ends.
package main

/*
#cgo linux LDFLAGS: -ldl
#include <dlfcn.h>
#include <stddef.h>

// From the reference of CUDA's driver API. All results are an enum, in which 0 is success.
struct call {
	const char *name;
	int result;
};

static void *cuda, *context;

#define CALL(symbol, types, ...) do { \
	int (*function) types = (int (*) types)dlsym(cuda, #symbol); \
	last.name = #symbol; \
	last.result = function ? function(__VA_ARGS__) : -1; \
	if (last.result) return last; \
} while (0)

static struct call begin(int *multiprocessors, size_t *available, size_t *total) {
	struct call last = {"dlopen of libcuda.so.1", -1};
	int device;
	cuda = dlopen("libcuda.so.1", RTLD_NOW);
	if (!cuda) return last;
	CALL(cuInit, (unsigned), 0);
	CALL(cuDeviceGet, (int *, int), &device, 0);
	CALL(cuCtxCreate_v2, (void **, unsigned, int), &context, 0, device);
	CALL(cuDeviceGetAttribute, (int *, int, int), multiprocessors, 16, device);
	CALL(cuMemGetInfo_v2, (size_t *, size_t *), available, total);
	return last;
}

static struct call allocate(size_t size) {
	struct call last;
	unsigned long long memory;
	CALL(cuMemAlloc_v2, (unsigned long long *, size_t), &memory, size);
	CALL(cuMemsetD8_v2, (unsigned long long, unsigned char, size_t), memory, 7, size);
	CALL(cuCtxSynchronize, (void));
	return last;
}

static struct call end(void) {
	struct call last;
	CALL(cuCtxSynchronize, (void));
	CALL(cuCtxDestroy_v2, (void *), context);
	return last;
}

static const char *name_of(int result) {
	const char *name = "unknown error";
	int (*function)(int, const char **) = cuda ? (int (*)(int, const char **))dlsym(cuda, "cuGetErrorName") : NULL;
	if (function) function(result, &name);
	return name;
}
*/
import "C"

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
)

// report is the line that is printed.
type report struct {
	Multiprocessors int `json:"multiprocessors"`
	// Free and Total are memory in bytes, before the first allocation.
	Free  uint64 `json:"free"`
	Total uint64 `json:"total"`
	// Second is the result of the second allocation.
	Second string `json:"second"`
}

func main() {
	runtime.LockOSThread() // A CUDA context belongs to a thread.
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cudaclient:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	var sizes []C.size_t
	for _, argument := range arguments {
		size, err := strconv.ParseUint(argument, 10, 64)
		if err != nil {
			return err
		}
		sizes = append(sizes, C.size_t(size))
	}
	if len(sizes) != 2 {
		return errors.New("usage: cudaclient BYTES BYTES")
	}
	var multiprocessors C.int
	var available, total C.size_t
	if err := failed(C.begin(&multiprocessors, &available, &total)); err != nil {
		return err
	}
	if err := failed(C.allocate(sizes[0])); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(report{
		Multiprocessors: int(multiprocessors),
		Free:            uint64(available),
		Total:           uint64(total),
		Second:          C.GoString(C.name_of(C.allocate(sizes[1]).result)),
	}); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return failed(C.end())
}

func failed(call C.struct_call) error {
	if call.result == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s (%d)", C.GoString(call.name), C.GoString(C.name_of(call.result)), int(call.result))
}
