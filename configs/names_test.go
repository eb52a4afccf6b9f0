package configs

import (
	"strings"
	"testing"
)

// TestParseResourceName has names that a kubelet 1.36 accepted and refused, and names around our own limit.
func TestParseResourceName(t *testing.T) {
	tests := []struct{ text, want string }{
		{"nvidia.com/gpu", "nvidia.com/gpu"},
		{"nvidia.com/gpu.shared", "nvidia.com/gpu.shared"},
		{"nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-1g.10gb.me"},
		{"nvidia.com/A_b.C-1", "nvidia.com/A_b.C-1"},
		{"gpu", "nvidia.com/gpu"},
		{"x/1", "x/1"},
		{"example.com/" + strings.Repeat("a", 51), "example.com/" + strings.Repeat("a", 51)},
		{strings.Repeat("a", 52), "nvidia.com/" + strings.Repeat("a", 52)},
		{"example.com/" + strings.Repeat("a", 52), ""},
		{strings.Repeat("a", 53), ""},
		{"", ""}, {"/", ""}, {"/gpu", ""}, {"nvidia.com/", ""}, {"nvidia.com/a/b", ""},
		{"kubernetes.io/gpu", ""}, {"x.kubernetes.io/gpu", ""}, {"requests.nvidia.com/gpu", ""},
		{"NVIDIA.com/gpu", ""}, {"nvidia..com/gpu", ""}, {".com/gpu", ""}, {"-a.com/gpu", ""}, {"a-/gpu", ""}, {"a_b.com/gpu", ""},
		{"nvidia.com/mig-1g.10gb+me", ""}, {"nvidia.com/gpu-", ""}, {"nvidia.com/.gpu", ""}, {"nvidia.com/_", ""},
		{"nvidia.com/g pu", ""}, {"nvidia.com/gpü", ""}, {"nvidia.com/gpu\n", ""},
	}
	for _, test := range tests {
		got, err := parseResourceName(test.text)
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("parseResourceName(%q) = %q, %v", test.text, got, err)
		}
	}
}

func TestNamesPartition(t *testing.T) {
	for name, want := range map[string]bool{
		"nvidia.com/mig-1g.5gb": true, "nvidia.com/mig-1g.24gb.me.all": true, "nvidia.com/mig-1g.24gb-me": true,
		"nvidia.com/mig-1c.2g.10gb": true, "nvidia.com/mig-1g.24gb.gfx": true,
		"nvidia.com/gpu": false, "nvidia.com/mig-": false, "nvidia.com/mig-1g": false, "nvidia.com/mig-1g.5gb.": false,
		"example.com/mig-1g.5gb": false, "nvidia.com/mig-2c.2g.10gb": false, "nvidia.com/MIG-1g.5gb": false,
	} {
		if got := namesPartition(name); got != want {
			t.Errorf("namesPartition(%q) = %v", name, got)
		}
	}
}
