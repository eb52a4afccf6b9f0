package configs

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// readNames reads the section resources. The names of GPUs always end with nvidia.com/gpu, for GPUs
// that match no other pattern.
func readNames(v value) (gpus, partitions []sharing.NamingRule) {
	gpus = readNamingRules(v.at("gpus").items)
	partitions = readNamingRules(v.at("mig").items)
	rest := sharing.NamingRule{Pattern: "*", Name: gpuResource}
	if len(gpus) == 0 || gpus[len(gpus)-1] != rest {
		gpus = append(gpus, rest)
	}
	return gpus, partitions
}

func readNamingRules(items []value) (rules []sharing.NamingRule) {
	// seen has the lines of the patterns so far, matchesAll the line of a pattern that matches
	// everything.
	seen, matchesAll := make(map[sharing.Pattern]int), 0
	for _, item := range items {
		pattern, name := get[sharing.Pattern](item, "pattern"), get[string](item, "name")
		if pattern == "" || name == "" {
			continue
		}
		if line := cmp.Or(matchesAll, seen[pattern]); line > 0 {
			item.at("pattern").problem(fmt.Sprintf("is never reached: the pattern on line %d matches as much", line))
			continue
		}
		seen[pattern] = item.line
		all := strings.Trim(string(pattern), "*") == ""
		if all {
			matchesAll = item.line
		}
		// NVIDIA's plugin calls everything nvidia.com/gpu anyway.
		if name != gpuResource || !all {
			item.note("named here; NVIDIA's plugin reads resources and ignores it")
		}
		noteEviction(item, name)
		rules = append(rules, sharing.NamingRule{Pattern: pattern, Name: name})
	}
	return rules
}

const (
	// resourceDomain is the domain of a name without a domain, as in NVIDIA's plugin
	// (api/config/v1/resources.go).
	resourceDomain = "nvidia.com/"
	gpuResource    = resourceDomain + "gpu"
	migResource    = resourceDomain + "mig-"
	// sharedSuffix is appended by renameByDefault.
	sharedSuffix = ".shared"
	// resourceNameBytes is the longest name with its domain in NVIDIA's plugin. The kubelet allows
	// 63 bytes after the slash, but names are also label values, which have at most 63.
	resourceNameBytes = 63
)

// parseResourceName returns the name with its domain. It refuses what the kubelet refuses at
// registration (Kubernetes 1.36, pkg/apis/core/v1/helper/helpers.go, IsExtendedResourceName):
//
//	resource name = [ domain "/" ] name
//
// The domain consists of lower-case DNS labels. The name consists of letters, digits, '-', '_' and
// '.', and begins and ends with a letter or a digit.
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
		return "", fmt.Errorf("a resource name has at most %d characters, this one has %d with its domain",
			resourceNameBytes, len(full))
	case strings.Contains(full, "kubernetes.io/"):
		return "", errors.New("the domain kubernetes.io is the kubelet's own")
	case strings.HasPrefix(full, "requests."):
		return "", errors.New(`a resource name cannot begin with "requests.", which resource quotas use`)
	case !domainForm.MatchString(domain):
		return "", fmt.Errorf("the part before the slash must be a lower-case domain such as %s",
			strings.TrimSuffix(resourceDomain, "/"))
	case !nameForm.MatchString(name):
		message := "the part after the slash must be letters, digits, '-', '_' or '.', with a letter or digit at " +
			"both ends"
		// A resource's name has "." where its MIG profile's name has "+".
		if dotted := strings.ReplaceAll(full, "+", "."); namesPartition(dotted) {
			message += didYouMean(dotted)
		}
		return "", errors.New(message)
	}
	return full, nil
}

// domainLabel is the form of a label in a domain. This and the forms below come from Kubernetes
// (apimachinery, util/validation).
const domainLabel = `[a-z0-9]([-a-z0-9]*[a-z0-9])?`

var (
	domainForm = regexp.MustCompile(`^` + domainLabel + `(\.` + domainLabel + `)*$`)
	nameForm   = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)
)

// namesPartition reports whether the name is a partition's default name, such as
// nvidia.com/mig-1g.5gb or nvidia.com/mig-1g.5gb.me.
func namesPartition(name string) bool {
	written, ok := strings.CutPrefix(name, migResource)
	if !ok {
		return false
	}
	// The name has "." after the memory where the profile has "+".
	profile, err := mig.ParseProfile(strings.Replace(written, "gb.", "gb+", 1))
	return err == nil && resourceDomain+profile.ResourceName() == name
}

// readSelection reads devices: all, a count, or a list of selectors; false if it is invalid. seen
// has the lines of the selectors in earlier entries for the same resource.
func readSelection(v value, seen map[sharing.Selector]int) (sharing.Selection, bool) {
	switch v.shape() {
	case shapeList:
		return sharing.Selection{List: readSelectors(v.items, seen)}, len(v.items) > 0
	case shapeNumber:
		count, ok := v.number()
		if ok && count < 1 {
			v.problem("selects nothing: expected 1 or more")
			return sharing.Selection{}, false
		}
		v.note("only the first devices are shared; NVIDIA's plugin takes all")
		return sharing.Selection{Count: count}, ok
	case shapeNothing:
		if v.node != nil { // More likely a lost list than a way to select all.
			v.problem("expected all, a number of devices, or a list of indexes and UUIDs")
			return sharing.Selection{}, false
		}
	}
	return sharing.Selection{}, v.node == nil || v.content != nil
}

// readSelectors reads selectors, and patterns in their place. It reports selectors that are already
// in seen, and adds the others to seen with their lines.
func readSelectors(items []value, seen map[sharing.Selector]int) []sharing.Selector {
	if len(items) == 0 {
		return nil
	}
	selectors := make([]sharing.Selector, 0, len(items))
	for _, item := range items {
		selector, ok := item.content.(sharing.Selector)
		if pattern := get[sharing.Pattern](item, "pattern"); pattern != "" {
			selector, ok = sharing.ModelSelector(pattern), true
		}
		if !ok {
			continue
		}
		if line, again := seen[selector]; again {
			item.problem(fmt.Sprintf("is listed on line %d already", line))
			continue
		}
		seen[selector] = item.line
		selectors = append(selectors, selector)
	}
	return selectors
}

// noteEviction adds a note about a resource whose pods the GPU Operator does not evict.
func noteEviction(v value, name string) {
	if name != "" && !sharing.OperatorEvicts(name) {
		v.note(sharing.NotEvicted)
	}
}
