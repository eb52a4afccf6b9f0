//go:build cgo

package driver

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/virgate/virgate/internal/nvml"
)

// asked is a call of the library as a whole.
func asked[T any](l *library, call string, get func(gonvml.Interface) (T, gonvml.Return)) (T, error) {
	var nothing T
	api := l.api.Load()
	if api == nil {
		return nothing, failed(call, gonvml.ERROR_UNINITIALIZED)
	}
	value, code := get(*api)
	if err := failed(call, code); err != nil {
		return nothing, err
	}
	return value, nil
}

// ask is a call for the thing that has the number. A number that nothing has
// answers InvalidArgument, as the driver does for a handle that it never gave.
func ask[Handle comparable, Number ~uint64, T any](l *library, call string, things *table[Handle, Number], number Number, get func(Handle) (T, gonvml.Return)) (T, error) {
	return asked(l, call, func(gonvml.Interface) (T, gonvml.Return) {
		thing, known := things.handle(number)
		if !known {
			var nothing T
			return nothing, gonvml.ERROR_INVALID_ARGUMENT
		}
		return get(thing)
	})
}

// askDevice is ask for a device.
func askDevice[T any](l *library, call string, d nvml.Device, get func(gonvml.Device) (T, gonvml.Return)) (T, error) {
	return ask(l, call, &l.devices, d, get)
}
