package daemon

import (
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/sharing"
)

// TestConfigOfClaims checks which configurations of NVIDIA's driver are accepted: none that would have no effect.
func TestConfigOfClaims(t *testing.T) {
	const version = `"apiVersion": "resource.nvidia.com/v1beta1", `
	for config, want := range map[string]string{
		`{` + version + `"kind": "GpuConfig"}`: "",
		`{` + version + `"kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}}`:  "",
		`{` + version + `"kind": "MigDeviceConfig", "sharing": {"strategy": "TimeSlicing"}}`:                                       "",
		`{` + version + `"kind": "GpuConfig", "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}}`: `sharing.strategy "MPS": the node's profile says how`,
		`{` + version + `"kind": "VfioDeviceConfig"}`:                                                                              `"VfioDeviceConfig" of "resource.nvidia.com/v1beta1" is not known`,
		`{"apiVersion": "example.com/v1", "kind": "GpuConfig"}`:                                                                    "is not known",
		`{`: "unexpected end",
	} {
		err := checkConfig([]byte(config))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", config, err, want)
		}
	}
	p := preparer{driver: "gpu.nvidia.com"}
	_, err := p.Prepare(t.Context(), dra.Claim{Namespace: "ns", Name: "c", Configs: [][]byte{[]byte(`{}`)}})
	if err == nil || !strings.Contains(err.Error(), "claim ns/c: its configuration for gpu.nvidia.com") {
		t.Error(err)
	}
}

// TestClaimedUnits checks the units of a claim's devices: Virgate's under either driver's name, NVIDIA's by their
// CDI specs.
func TestClaimedUnits(t *testing.T) {
	const uuid = "GPU-697ef0ed-27ad-5f09-ab59-43a2445ac537"
	gpus := []sharing.GPU{{UUID: uuid}}
	inventory := func() ([]sharing.GPU, error) { return gpus, nil }
	units := claimedUnits(inventory, cdi.NewClaims(inventory))
	unitName := strings.ToLower(uuid)
	for _, test := range []struct {
		driver, device string
	}{
		{"gpu.virgate.github.io", unitName},
		{"gpu.nvidia.com", unitName + "-ts"},
		{"gpu.nvidia.com", "gpu-0"}, // Of NVIDIA's driver.
	} {
		got, guessed := units(test.driver, []string{test.device}, nil)
		if !slices.Equal(got, []string{uuid}) || guessed {
			t.Errorf("%s of %s: %v, guessed %t", test.device, test.driver, got, guessed)
		}
	}
	for _, driver := range []string{"gpu.virgate.github.io", "gpu.nvidia.com"} {
		if got, guessed := units(driver, []string{unitName + "-1g10gb-4"}, nil); len(got) > 0 || guessed {
			t.Errorf("a partition that is gone, of %s: %v, guessed %t", driver, got, guessed)
		}
	}
}
