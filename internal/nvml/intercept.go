package nvml

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/virgate/virgate/mig"
)

// Call is one call of a Library's method, as an Interceptor sees it.
type Call struct {
	// Method is the method's name in Library, for example "DeviceGetUUID".
	Method string
	// Arguments are the method's arguments, in order and with their types.
	Arguments []any
	// Answer is the type of the method's result besides the error; nil for methods that return only
	// an error.
	Answer reflect.Type
}

// String names the call for an error message: the method, with the arguments that tell more than a
// handle does, for example "DeviceGetNvLinkState(3)".
func (c Call) String() string {
	var telling []string
	for _, argument := range c.Arguments {
		switch argument.(type) {
		case int, bool, mig.Placement:
			telling = append(telling, fmt.Sprint(argument))
		}
	}
	if telling == nil {
		return c.Method
	}
	return c.Method + "(" + strings.Join(telling, ", ") + ")"
}

// Interceptor is called in place of a Library's methods. It makes the call with do, at most once
// and from any goroutine, or returns an answer of its own. Its result must have the call's Answer
// type; nil means the zero value. It may be called from several goroutines at once.
type Interceptor func(call Call, do func() (any, error)) (any, error)

// Intercept returns a library that routes calls of these methods, or of all methods if none is
// named, through the interceptor. lib may be nil if the interceptor never calls do.
func Intercept(lib Library, interceptor Interceptor, methods ...string) Library {
	return &intercepted{
		lib:         lib,
		interceptor: interceptor,
		methods:     methods,
	}
}

// intercepted routes all methods of Library through invoke; forwarders.go has them.
//
//go:generate go run ../../test/forwarders
type intercepted struct {
	lib         Library
	interceptor Interceptor
	// methods are the intercepted methods; all when empty.
	methods []string
	// deadlines is set by WithDeadlines only; nil for other interceptors.
	deadlines *deadlines
}

func invoke[T any](l *intercepted, method string, do func() (any, error), arguments ...any) (T, error) {
	var answer any
	var err error
	if l.passes(method) {
		answer, err = do()
	} else {
		answer, err = l.interceptor(Call{
			Method:    method,
			Arguments: arguments,
			Answer:    reflect.TypeFor[T](),
		}, do)
	}
	value, _ := answer.(T)
	return value, err
}

// passes reports whether calls of the method bypass the interceptor.
func (l *intercepted) passes(method string) bool {
	return len(l.methods) > 0 && !slices.Contains(l.methods, method)
}

// invoke0, invoke1 and invoke2 are for methods with that many arguments. A call that bypasses the
// interceptor allocates nothing.
func invoke0[T any](l *intercepted, method string, do func(Library) (T, error)) (T, error) {
	if l.passes(method) {
		return do(l.lib)
	}
	return invoke[T](l, method, func() (any, error) { return do(l.lib) })
}

func invoke1[A, T any](l *intercepted, method string, do func(Library, A) (T, error), a A) (T, error) {
	if l.passes(method) {
		return do(l.lib, a)
	}
	return invoke[T](l, method, func() (any, error) { return do(l.lib, a) }, a)
}

func invoke2[A, B, T any](l *intercepted, method string, do func(Library, A, B) (T, error), a A, b B) (T, error) {
	if l.passes(method) {
		return do(l.lib, a, b)
	}
	return invoke[T](l, method, func() (any, error) { return do(l.lib, a, b) }, a, b)
}

// invokeOnly is for methods that return only an error.
func invokeOnly(l *intercepted, method string, do func() error, arguments ...any) error {
	if l.passes(method) {
		return do()
	}
	_, err := l.interceptor(Call{Method: method, Arguments: arguments}, func() (any, error) { return nil, do() })
	return err
}
