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
	section := v.mapping(keysOf("resources")...)
	gpus = readNamingRules(section.field("gpus"), keysOf("resources.gpus[]"))
	partitions = readNamingRules(section.field("mig"), keysOf("resources.mig[]"))
	rest := sharing.NamingRule{Pattern: "*", Name: gpuResource}
	if len(gpus) == 0 || gpus[len(gpus)-1] != rest {
		gpus = append(gpus, rest)
	}
	return gpus, partitions
}

func readNamingRules(v value, keys []string) []sharing.NamingRule {
	items, _ := v.items()
	var rules []sharing.NamingRule
	// seen has the lines of the patterns so far, matchesAll the line of a pattern that matches
	// everything.
	seen, matchesAll := make(map[string]int), 0
	for _, item := range items {
		if item.shape() != shapeMapping {
			item.problem("expected a mapping with pattern and name")
			continue
		}
		f := item.mapping(keys...)
		pattern, ok := f.required("pattern").text()
		name, named := readResourceName(f.required("name"))
		if !ok || !named {
			continue
		}
		if pattern == "" {
			f.field("pattern").problem("expected a pattern: * matches everything")
			continue
		}
		if line := cmp.Or(matchesAll, seen[pattern]); line > 0 {
			f.field("pattern").problem(fmt.Sprintf("is never reached: the pattern on line %d matches as much", line))
			continue
		}
		seen[pattern] = item.line
		all := strings.Trim(pattern, "*") == ""
		if all {
			matchesAll = item.line
		}
		// NVIDIA's plugin calls everything nvidia.com/gpu anyway.
		if name != gpuResource || !all {
			item.note("named here; NVIDIA's plugin reads resources and ignores it")
		}
		noteEviction(item, name)
		rules = append(rules, sharing.NamingRule{Pattern: sharing.Pattern(pattern), Name: name})
	}
	return rules
}

// readResourceName reads a name and reports a name that the kubelet would refuse. It also returns
// false for an absent name.
func readResourceName(v value) (string, bool) {
	text, ok := v.text()
	if !ok {
		return "", false
	}
	name, err := parseResourceName(text)
	if err != nil {
		message := err.Error()
		// A resource's name has "." where its MIG profile's name has "+".
		if dotted, err := parseResourceName(strings.ReplaceAll(text, "+", ".")); err == nil && namesPartition(dotted) {
			message += didYouMean(dotted)
		}
		v.problem(message)
		return "", false
	}
	return name, true
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
		return "",
			errors.New(
				"the part after the slash must be letters, digits, '-', '_' or '.', with a letter or digit at " +
					"both ends")
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

func readExclude(v value) []sharing.Selector {
	items, ok := v.items()
	if !ok || len(items) == 0 {
		return nil
	}
	v.note("Virgate's own: these are never offered; NVIDIA's plugin has no such key")
	return readSelectors(items, make(map[sharing.Selector]int), func(item value) (sharing.Selector, bool) {
		if item.shape() != shapeMapping {
			return readSelector(item, ", or {pattern: …} with a part of the product name")
		}
		v := item.mapping(keysOf("exclude[]")...).required("pattern")
		pattern, ok := v.text()
		if ok && pattern == "" {
			v.problem("expected a pattern: * matches everything")
		}
		return sharing.ModelSelector(sharing.Pattern(pattern)), ok && pattern != ""
	})
}

const expectedDevices = "expected all, a number of devices, or a list of indexes and UUIDs"

// readSelection reads devices: all, a count, or a list of selectors; false if it is invalid. seen
// has the lines of the selectors in earlier entries for the same resource.
func readSelection(v value, seen map[sharing.Selector]int) (sharing.Selection, bool) {
	if v.node == nil {
		return sharing.Selection{}, true
	}
	switch v.shape() {
	case shapeList:
		items, _ := v.items()
		if len(items) == 0 {
			v.problem("selects nothing: " + expectedDevices)
		}
		v.note("only these devices are shared; NVIDIA's plugin takes all")
		return sharing.Selection{List: readSelectors(items, seen,
			func(item value) (sharing.Selector, bool) { return readSelector(item, "") })}, true
	case shapeNumber:
		count, ok := v.number()
		if ok && count < 1 {
			v.problem("selects nothing: expected 1 or more")
			return sharing.Selection{}, false
		}
		v.note("only the first devices are shared; NVIDIA's plugin takes all")
		return sharing.Selection{Count: count}, ok
	case shapeText:
		if v.node.Value == "all" {
			return sharing.Selection{}, true
		}
	}
	// An empty "devices:" is a problem too: it is more likely a lost list than a way to select all.
	v.problem(expectedDevices)
	return sharing.Selection{}, false
}

// readSelector reads a selector of ParseSelector. others is the end of the message, with the other
// forms allowed.
func readSelector(item value, others string) (sharing.Selector, bool) {
	selector, err := sharing.ParseSelector(item.node.Value)
	// A GPU index may be written as a number.
	if shape := item.shape(); err != nil || shape != shapeText && shape != shapeNumber {
		item.problem(
			"expected a GPU index (0), a MIG index (0:1), a UUID (GPU-…, MIG-…) or a PCI bus ID (00000000:3B:00.0)" +
				others)
		return sharing.Selector{}, false
	}
	return selector, true
}

// readSelectors reads selectors. It reports selectors that are already in seen, and adds the others
// to seen with their lines.
func readSelectors(
	items []value,
	seen map[sharing.Selector]int,
	read func(value) (sharing.Selector, bool),
) []sharing.Selector {
	selectors := make([]sharing.Selector, 0, len(items))
	for _, item := range items {
		selector, ok := read(item)
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
