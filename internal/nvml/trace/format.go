package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// version is the version of the format; a reader rejects others.
const version = 1

type header struct {
	Trace  int  `json:"trace"`
	Masked bool `json:"masked"`
}

// line is a call. It has an answer or an error, or neither if the call returns only an error, which
// was nil.
type line struct {
	Call      string          `json:"call"`
	Arguments []uint64        `json:"arguments,omitempty"`
	Answer    json.RawMessage `json:"answer,omitempty"`
	Error     *nvml.Error     `json:"error,omitempty"`
}

// key is the same for all calls of one method with the same arguments.
func key(method string, arguments []uint64) string { return fmt.Sprint(method, arguments) }

// numbers returns the arguments of a call as a trace has them. It leaves out times, which are the
// timeout of a wait for events and the start time of samples: a program that replays the trace uses
// other times.
func numbers(arguments []any) []uint64 {
	var list []uint64
	for _, argument := range arguments {
		switch argument := argument.(type) {
		case uint64, time.Duration:
		case bool:
			number := uint64(0)
			if argument {
				number = 1
			}
			list = append(list, number)
		case nvml.MemoryErrorCounter:
			list = append(list, numbers([]any{argument.Uncorrected, argument.Aggregate, argument.Location})...)
		case mig.Placement:
			list = append(list, uint64(argument.Start), uint64(argument.Size))
		case int:
			list = append(list, uint64(argument))
		case nvml.ComputeMode:
			list = append(list, uint64(argument))
		default: // A handle, or a set of event types.
			list = append(list, reflect.ValueOf(argument).Uint())
		}
	}
	return list
}

// method describes a method of nvml.Library for a trace.
type method struct {
	// arguments is how many numbers represent the method's arguments.
	arguments int
	// answer is nil for a method that returns only an error.
	answer reflect.Type
}

func methods() map[string]method {
	all := map[string]method{}
	library := reflect.TypeFor[nvml.Library]()
	for i := range library.NumMethod() {
		signature := library.Method(i).Type
		var arguments []any
		for in := range signature.NumIn() {
			arguments = append(arguments, reflect.Zero(signature.In(in)).Interface())
		}
		m := method{arguments: len(numbers(arguments))}
		if signature.NumOut() > 1 {
			m.answer = signature.Out(0)
		}
		all[library.Method(i).Name] = m
	}
	return all
}

// check returns an error if a call of the method is invalid.
func (m method) check(l line) error {
	switch {
	case len(l.Arguments) != m.arguments:
		return fmt.Errorf("%s has %d arguments, want %d", l.Call, len(l.Arguments), m.arguments)
	case l.Error != nil && l.Answer != nil:
		return fmt.Errorf("%s has both an answer and an error", l.Call)
	case l.Error != nil && l.Error.Return == nvml.Success:
		return fmt.Errorf("%s has an error of code %d, which is none", l.Call, int(l.Error.Return))
	case l.Error != nil:
		return nil
	}
	if _, err := l.decode(m.answer); err != nil {
		return fmt.Errorf("answer of %s: %w", l.Call, err)
	}
	return nil
}

// decode returns the line's answer as a value of that type; nil for a call without an answer.
func (l line) decode(answer reflect.Type) (any, error) {
	switch {
	case answer == nil && l.Answer != nil:
		return nil, fmt.Errorf("%s, want none", l.Answer)
	case answer == nil:
		return nil, nil
	case l.Answer == nil:
		return nil, errors.New("there is none")
	}
	value := reflect.New(answer)
	err := decodeStrictly(l.Answer, value.Interface())
	return value.Elem().Interface(), err
}

// decodeStrictly decodes one JSON value, and rejects fields that the target does not have.
func decodeStrictly(text []byte, target any) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(target); err != nil {
		return err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the value")
	}
	return nil
}
