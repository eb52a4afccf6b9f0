package trace

import (
	"bytes"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

const someHeader = `{"trace":1,"masked":true}` + "\n"

// TestParseErrors checks that an invalid trace is refused, and that the error gives the line.
func TestParseErrors(t *testing.T) {
	tests := []struct {
		name, trace string
		want        []string
	}{
		{"nothing", "", []string{"empty"}},
		{"no header", `{"call":"Init"}` + "\n", []string{"line 1", "header", "call"}},
		{"another version", `{"trace":2}` + "\n", []string{"line 1", "version 2"}},
		{"no JSON", someHeader + "Init\n", []string{"line 2", "invalid character"}},
		{"a blank line", someHeader + "\n", []string{"line 2", "EOF"}},
		{"two values on a line", someHeader + `{"call":"Init"}{"call":"Init"}` + "\n", []string{"line 2", "follows"}},
		{"cut off", someHeader + `{"call":"Init"}`, []string{"line 2", "cut off"}},
		{"an unknown field", someHeader + `{"call":"Init","at":1}` + "\n", []string{"line 2", `"at"`}},
		{"an unknown call", someHeader + `{"call":"Init"}` + "\n" + `{"call":"DeviceReset"}` + "\n", []string{"line 3", `"DeviceReset"`}},
		{"too few arguments", someHeader + `{"call":"DeviceGetUUID","answer":"x"}` + "\n", []string{"line 2", "DeviceGetUUID", "0 arguments, want 1"}},
		{"too many arguments", someHeader + `{"call":"Init","arguments":[1]}` + "\n", []string{"line 2", "1 arguments, want 0"}},
		{"an argument that is no number", someHeader + `{"call":"DeviceGetUUID","arguments":["a"],"answer":"x"}` + "\n", []string{"line 2", "arguments"}},
		{"no answer", someHeader + `{"call":"DeviceGetUUID","arguments":[1]}` + "\n", []string{"line 2", "DeviceGetUUID", "there is none"}},
		{"an answer of another call", someHeader + `{"call":"DeviceGetUUID","arguments":[1],"answer":5}` + "\n", []string{"line 2", "DeviceGetUUID", "number"}},
		{"an answer with more", someHeader + `{"call":"DeviceGetMigMode","arguments":[1],"answer":{"Current":true,"Next":true}}` + "\n", []string{"line 2", `"Next"`}},
		{"an answer to a call without", someHeader + `{"call":"EventSetFree","arguments":[1],"answer":5}` + "\n", []string{"line 2", "want none"}},
		{"an answer and an error", someHeader + `{"call":"DeviceGetCount","answer":5,"error":{"call":"x","return":3}}` + "\n", []string{"line 2", "both"}},
		{"an error that is none", someHeader + `{"call":"DeviceGetCount","error":{"call":"x","return":0}}` + "\n", []string{"line 2", "code 0"}},
		{"an endless line", someHeader + strings.Repeat(" ", longestLine+1) + "\n", []string{"line 2", "too long"}},
		{"an endless trace", strings.Repeat("\n", Limit+1), []string{"bytes, more than"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			lib, err := Parse([]byte(test.trace))
			if err == nil {
				t.Fatalf("Parse accepts it: %v", lib)
			}
			for _, want := range append(test.want, "trace: ") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

// TestMethods checks the numbers and kind of answer for methods whose arguments are not all handles and indices.
func TestMethods(t *testing.T) {
	got := methods()
	for name, want := range map[string]method{
		"Init":                                 {},
		"DeviceGetUUID":                        {1, reflect.TypeFor[string]()},
		"DeviceGetProcessUtilization":          {1, reflect.TypeFor[[]nvml.ProcessSample]()},
		"DeviceSetMigMode":                     {2, reflect.TypeFor[nvml.Return]()},
		"DeviceCreateGpuInstanceWithPlacement": {4, reflect.TypeFor[nvml.GPUInstance]()},
		"DeviceRegisterEvents":                 {3, nil},
		"EventSetWait":                         {1, reflect.TypeFor[nvml.Event]()},
	} {
		if got[name] != want {
			t.Errorf("%s: %+v, want %+v", name, got[name], want)
		}
	}
}

// FuzzParse checks that a trace which is accepted can be played to its end.
func FuzzParse(f *testing.F) {
	data, err := os.ReadFile("testdata/t4.jsonl")
	if err != nil {
		f.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		f.Add(append([]byte(someHeader), line...))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		lib, err := Parse(data)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "trace: ") {
				t.Fatalf("error %q does not say what of", err)
			}
			return
		}
		if _, err := nvml.Scan(lib); err != nil && strings.Contains(err.Error(), "trace: ") {
			t.Fatalf("an answer that was accepted cannot be read: %v", err)
		}
	})
}
