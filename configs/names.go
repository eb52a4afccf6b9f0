package configs

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// readNames reads the section resources. The names for GPUs always end with
// nvidia.com/gpu for whatever has no other.
func readNames(v value) (gpus, partitions []sharing.Naming) {
	section := v.mapping(keysOf("resources")...)
	gpus = readNamings(section.field("gpus"), keysOf("resources.gpus[]"))
	partitions = readNamings(section.field("mig"), keysOf("resources.mig[]"))
	rest := sharing.Naming{Pattern: "*", Name: gpuResource}
	if len(gpus) == 0 || gpus[len(gpus)-1] != rest {
		gpus = append(gpus, rest)
	}
	return gpus, partitions
}

func readNamings(v value, keys []string) []sharing.Naming {
	items, _ := v.items()
	var namings []sharing.Naming
	// reached has the lines of the patterns so far; everything, once one of them
	// matches all, its line.
	reached, everything := make(map[string]int), 0
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
		if line := cmp.Or(everything, reached[pattern]); line > 0 {
			f.field("pattern").problem(fmt.Sprintf("is never reached: the pattern on line %d matches as much", line))
			continue
		}
		reached[pattern] = item.line
		all := strings.Trim(pattern, "*") == ""
		if all {
			everything = item.line
		}
		// The last naming is what NVIDIA's plugin has without being told.
		if name != gpuResource || !all {
			item.note("named here; NVIDIA's plugin reads resources and ignores it")
		}
		namings = append(namings, sharing.Naming{Pattern: sharing.Pattern(pattern), Name: name})
	}
	return namings
}

// readResourceName reads a name and reports one that the kubelet would refuse.
// It is false for an absent one.
func readResourceName(v value) (string, bool) {
	text, ok := v.text()
	if !ok {
		return "", false
	}
	name, err := parseResourceName(text)
	if err != nil {
		v.problem(err.Error())
		return "", false
	}
	return name, true
}
