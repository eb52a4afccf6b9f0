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

// TestReturnNames checks that the names are at the numbers of nvml.h.
func TestReturnNames(t *testing.T) {
	for code, want := range map[nvml.Return]string{
		nvml.Success: "SUCCESS", nvml.NoPermission: "NO_PERMISSION", nvml.NotFound: "NOT_FOUND", 8: "INSUFFICIENT_POWER", nvml.Timeout: "TIMEOUT",
		nvml.FunctionNotFound: "FUNCTION_NOT_FOUND", nvml.ResetRequired: "RESET_REQUIRED", nvml.InUse: "IN_USE", nvml.InsufficientResources: "INSUFFICIENT_RESOURCES",
		27: "NOT_READY", 30: "RESET_TYPE_NOT_SUPPORTED", 31: "ERROR_31", nvml.Unknown: "UNKNOWN", -1: "ERROR_-1",
	} {
		if got := code.String(); got != want {
			t.Errorf("%d is %s, want %s", code, got, want)
		}
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
