//go:build cgo

package driver

import (
	"fmt"
	"math"

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

// askWith is ask for a call with an argument, which its name tells. One that the
// driver's 32 bits without a sign cannot take answers InvalidArgument.
func askWith[Handle comparable, Number ~uint64, T any](
	l *library, call string, things *table[Handle, Number], number Number, argument int, get func(Handle, int) (T, gonvml.Return),
) (T, error) {
	return ask(l, with(call, argument), things, number, func(thing Handle) (T, gonvml.Return) {
		if !ordinal(argument) {
			var nothing T
			return nothing, gonvml.ERROR_INVALID_ARGUMENT
		}
		return get(thing, argument)
	})
}

// with writes the argument of a call into its name.
func with(call string, argument int) string { return fmt.Sprintf("%s(%d)", call, argument) }

// ordinal says that the number survives the way to the driver.
func ordinal(number int) bool { return number >= 0 && number <= math.MaxInt32 }

// numbered is what a call answers that returns a handle: its number.
func (t *table[Handle, Number]) numbered(handle Handle, code gonvml.Return) (Number, gonvml.Return) {
	if code != gonvml.SUCCESS {
		return 0, code
	}
	return t.number(handle), code
}

// askDevice is ask for a device.
func askDevice[T any](l *library, call string, d nvml.Device, get func(gonvml.Device) (T, gonvml.Return)) (T, error) {
	return ask(l, call, &l.devices, d, get)
}
