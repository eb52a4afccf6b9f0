package simkubelet

import (
	"fmt"
	"regexp"
	"strings"
)

// The grammar of qualified names (k8s.io/apimachinery, pkg/util/validation).
var (
	domainPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	namePattern   = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)
)

// checkResourceName returns why the kubelet would refuse the name, nil if it
// would not: it takes what IsExtendedResourceName takes, a domain and a name,
// with room for quota's "requests." before it (pkg/apis/core/v1/helper).
func checkResourceName(resource string) error {
	domain, name, ok := strings.Cut(resource, "/")
	domain = "requests." + domain
	switch {
	case !ok:
		return fmt.Errorf("resource name %q has no domain", resource)
	case strings.Contains(resource, "kubernetes.io/"):
		return fmt.Errorf("resource name %q is in a domain of Kubernetes itself", resource)
	case strings.HasPrefix(resource, "requests."):
		return fmt.Errorf("resource name %q starts with requests", resource)
	case len(domain) > 253 || !domainPattern.MatchString(domain):
		return fmt.Errorf("resource name %q has no lower-case DNS name of at most 244 characters before the slash", resource)
	case len(name) > 63 || !namePattern.MatchString(name):
		return fmt.Errorf("resource name %q has no name of at most 63 letters, digits, dots, dashes and underscores after the slash", resource)
	}
	return nil
}
