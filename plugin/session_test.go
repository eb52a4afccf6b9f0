package plugin

import (
	"strings"
	"testing"
)

// TestSocketName holds that names are used once, are found by RemoveSockets, and
// fit into a socket's address below the kubelet's own directory.
func TestSocketName(t *testing.T) {
	const dir = "/var/lib/kubelet/device-plugins/"
	const longest = 107 // bytes, of Linux' sockaddr_un without its end
	seen := map[string]bool{}
	for _, resource := range []string{"nvidia.com/gpu", "nvidia.com/gpu", "nvidia.com/" + strings.Repeat("x", 63), "a/" + strings.Repeat("x", 300)} {
		name := socketName(resource)
		if seen[name] || strings.Contains(name, "/") || !strings.HasPrefix(name, socketPrefix) || !strings.HasSuffix(name, ".sock") {
			t.Errorf("%s: %s", resource, name)
		}
		if len(dir)+len(name) > longest {
			t.Errorf("%s: %d bytes", resource, len(dir)+len(name))
		}
		seen[name] = true
	}
}
