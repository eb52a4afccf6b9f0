package nvml_test

import (
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// TestIntercept checks that each method of Library reaches the interceptor under its own name, with all arguments
// in order, and returns the interceptor's answer.
func TestIntercept(t *testing.T) {
	var seen nvml.Call
	answered := errors.New("answered")
	lib := reflect.ValueOf(nvml.Intercept(nil, func(call nvml.Call, _ func() (any, error)) (any, error) {
		seen = call
		if call.Answer == nil {
			return nil, answered
		}
		return distinct(call.Answer, 100).Interface(), answered
	}))
	library := reflect.TypeFor[nvml.Library]()
	for i := range library.NumMethod() {
		method := library.Method(i)
		var in []reflect.Value
		want := nvml.Call{Method: method.Name}
		for n := range method.Type.NumIn() {
			in = append(in, distinct(method.Type.In(n), n+1))
			want.Arguments = append(want.Arguments, in[n].Interface())
		}
		out := lib.MethodByName(method.Name).Call(in)
		if len(out) == 2 {
			want.Answer = method.Type.Out(0)
			if got := out[0].Interface(); !reflect.DeepEqual(got, distinct(want.Answer, 100).Interface()) {
				t.Errorf("%s returns %v", method.Name, got)
			}
		}
		if err, _ := out[len(out)-1].Interface().(error); !errors.Is(err, answered) {
			t.Errorf("%s returns the error %v", method.Name, err)
		}
		if seen.Method != want.Method || seen.Answer != want.Answer {
			t.Errorf("%s is seen as %s with an answer of %v", method.Name, seen.Method, seen.Answer)
		}
		if diff := cmp.Diff(want.Arguments, seen.Arguments); diff != "" {
			t.Errorf("arguments of %s (-want +got):\n%s", method.Name, diff)
		}
	}
}

// TestInterceptMakesTheCall checks that do calls the same method of the library below with the same arguments,
// even if an interceptor in between handles other methods only.
func TestInterceptMakesTheCall(t *testing.T) {
	library := reflect.TypeFor[nvml.Library]()
	var below nvml.Call
	lib := nvml.Intercept(nil, func(call nvml.Call, _ func() (any, error)) (any, error) { below = call; return nil, nil })
	var seen []string
	lib = nvml.Intercept(lib, func(call nvml.Call, do func() (any, error)) (any, error) {
		seen = append(seen, call.Method)
		return do()
	}, "Init", "DeviceGetUUID")
	lib = nvml.Intercept(lib, func(call nvml.Call, do func() (any, error)) (any, error) {
		answer, err := do()
		if diff := cmp.Diff(call.Arguments, below.Arguments); diff != "" || below.Method != call.Method {
			t.Errorf("%s calls %s (-want +got):\n%s", call.Method, below.Method, diff)
		}
		return answer, err
	})
	for i := range library.NumMethod() {
		var in []reflect.Value
		for n := range library.Method(i).Type.NumIn() {
			in = append(in, distinct(library.Method(i).Type.In(n), n+1))
		}
		reflect.ValueOf(lib).MethodByName(library.Method(i).Name).Call(in)
	}
	if !slices.Equal(seen, []string{"DeviceGetUUID", "Init"}) {
		t.Errorf("one who wants two methods sees %q", seen)
	}
}

// distinct is a value of the type that differs from its zero value and, for most types, from the value for
// another n.
func distinct(of reflect.Type, n int) reflect.Value {
	value := reflect.New(of).Elem()
	switch {
	case value.CanInt():
		value.SetInt(int64(n))
	case value.CanUint():
		value.SetUint(uint64(n))
	case of.Kind() == reflect.Bool:
		value.SetBool(true)
	case of.Kind() == reflect.String:
		value.SetString("answer")
	case of.Kind() == reflect.Slice:
		value.Set(reflect.MakeSlice(of, 1, 1))
	case of.Kind() == reflect.Struct:
		value.Field(0).Set(distinct(of.Field(0).Type, n))
	}
	return value
}

// TestCallText checks a call's name in messages.
func TestCallText(t *testing.T) {
	for want, arguments := range map[string][]any{
		"M":         {nvml.Device(7)},
		"M(3)":      {nvml.Device(7), 3},
		"M(true)":   {nvml.Device(7), true},
		"M(9, 0:4)": {nvml.Device(7), 9, mig.Placement{Start: 0, Size: 4}},
	} {
		if got := (nvml.Call{Method: "M", Arguments: arguments}).String(); got != want {
			t.Errorf("%v: %q, want %q", arguments, got, want)
		}
	}
}
