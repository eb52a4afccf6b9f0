package configs

import (
	"errors"
	"fmt"
	"strings"

	"github.com/virgate/virgate/mig"
)

const (
	// resourceDomain is put before a name without one, as NVIDIA's plugin does
	// (api/config/v1/resources.go).
	resourceDomain = "nvidia.com/"
	gpuResource    = resourceDomain + "gpu"
	// sharedSuffix is what renameByDefault appends.
	sharedSuffix = ".shared"
	// resourceNameBytes is the longest name, domain included, that NVIDIA's
	// plugin allows. The kubelet would take more (63 after the slash), but the
	// name is also made into label values, which end there.
	resourceNameBytes = 63
)

// parseResourceName returns the fully qualified name. What it refuses, the
// kubelet refuses at registration (Kubernetes 1.36,
// pkg/apis/core/v1/helper/helpers.go, IsExtendedResourceName):
//
//	resource name = [ domain "/" ] name
//
// The domain is lower-case DNS labels between dots. The name is of letters,
// digits, '-', '_' and '.', with a letter or a digit at both ends.
func parseResourceName(s string) (string, error) {
	if s == "" {
		return "", errors.New("expected a resource name")
	}
	full := s
	if !strings.Contains(s, "/") {
		full = resourceDomain + s
	}
	domain, name, _ := strings.Cut(full, "/")
	switch {
	case len(full) > resourceNameBytes:
		return "", fmt.Errorf("a resource name has at most %d characters, this one has %d with its domain", resourceNameBytes, len(full))
	case strings.Contains(full, "kubernetes.io/"):
		return "", errors.New("the domain kubernetes.io is the kubelet's own")
	case strings.HasPrefix(full, "requests."):
		return "", errors.New(`a resource name cannot begin with "requests.", which resource quotas use`)
	case !isDomain(domain):
		return "", fmt.Errorf("the part before the slash must be a lower-case domain such as %s", strings.TrimSuffix(resourceDomain, "/"))
	case !isLabel(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_."):
		return "", errors.New("the part after the slash must be letters, digits, '-', '_' or '.', with a letter or digit at both ends")
	}
	return full, nil
}

func isDomain(s string) bool {
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label, "") {
			return false
		}
	}
	return true
}

// isLabel says that s has lower-case letters, digits, '-' and the characters of
// more only, and neither begins nor ends with punctuation.
func isLabel(s, more string) bool {
	if s == "" || strings.ContainsRune("-_.", rune(s[0])) || strings.ContainsRune("-_.", rune(s[len(s)-1])) {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-"+more) == ""
}

// namesPartition says that the name is the one that a partition has by default,
// nvidia.com/mig-1g.5gb or nvidia.com/mig-1g.5gb.me.
func namesPartition(name string) bool {
	written, ok := strings.CutPrefix(name, resourceDomain+"mig-")
	if !ok {
		return false
	}
	// The name has "." where the profile has "+", behind the memory.
	profile, err := mig.ParseProfile(strings.Replace(written, "gb.", "gb+", 1))
	return err == nil && resourceDomain+profile.ResourceName() == name
}
