package simkubelet

import (
	"strings"
	"testing"
)

// The verdicts are those of the real kubelet, 1.36.3.
func TestResourceNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"nvidia.com/gpu":                true,
		"nvidia.com/gpu.shared":         true,
		"nvidia.com/mig-1g.10gb.me":     true,
		"nvidia.com/" + repeat("a", 63): true,
		repeat("a", 240) + ".com/gpu":   true,
		"gpu":                           false,
		"":                              false,
		"/gpu":                          false,
		"nvidia.com/":                   false,
		"kubernetes.io/gpu":             false,
		"x.kubernetes.io/gpu":           false,
		"requests.nvidia.com/gpu":       false,
		"NVIDIA.com/gpu":                false,
		"nvidia..com/gpu":               false,
		"nvidia.com/" + repeat("a", 64): false,
		repeat("a", 241) + ".com/gpu":   false,
		"nvidia.com/mig-1g.10gb+me":     false,
		"nvidia.com/a/b":                false,
		"nvidia.com/gpu-":               false,
		"nvidia.com/gpu\n":              false,
	} {
		if err := checkResourceName(name); (err == nil) != ok {
			t.Errorf("%q: got %v, want accepted %t", name, err, ok)
		}
	}
}

func repeat(s string, n int) string { return strings.Repeat(s, n) }
