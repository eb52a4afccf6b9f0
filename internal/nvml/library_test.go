package nvml_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

func TestError(t *testing.T) {
	err := fmt.Errorf("read GPU 3: %w", &nvml.Error{Call: "DeviceGetUUID", Return: nvml.GPUIsLost})
	if !errors.Is(err, nvml.GPUIsLost) || errors.Is(err, nvml.Unknown) {
		t.Errorf("errors.Is does not find the one return code in %v", err)
	}
	if want := "read GPU 3: nvml: DeviceGetUUID: GPU_IS_LOST"; err.Error() != want {
		t.Errorf("message %q, want %q", err, want)
	}
}

func TestParseReturn(t *testing.T) {
	for code := range nvml.Return(1000) {
		name := code.String()
		got, known := nvml.ParseReturn(name)
		if known && got != code {
			t.Errorf("ParseReturn(%q) = %d, want %d", name, got, code)
		}
		if unnamed := fmt.Sprintf("ERROR_%d", code); known == (name == unnamed) {
			t.Errorf("ParseReturn(%q) knows it: %t", name, known)
		}
	}
	if got, known := nvml.ParseReturn("GPU_IS_LOST"); got != nvml.GPUIsLost || !known {
		t.Errorf("GPU_IS_LOST is %d, %t", got, known)
	}
}

func TestArchitecture(t *testing.T) {
	want := []string{2: "kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", 16: ""}
	for value, name := range want {
		if got := nvml.Architecture(value).String(); got != name {
			t.Errorf("architecture %d is %q, want %q", value, got, name)
		}
	}
}
