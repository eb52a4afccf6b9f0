package sharing

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Selector names a GPU or a partition in a profile. The grammar is the one for the devices list of
// NVIDIA's device plugin (api/config/v1/replicas.go), and the PCI bus ID:
//
//	0                         the GPU with this index (GPU.Index)
//	GPU-<uuid>                the GPU with this UUID
//	00000000:3B:00.0          the GPU with this PCI bus ID; a domain of four
//	                          digits, as lspci prints it, means the same
//	0:1                       the partition with MIG device index 1 on GPU 0
//	MIG-<uuid>                the partition with this UUID
//	MIG-GPU-<uuid>/<gi>/<ci>  the partition with these instances on that GPU,
//	                          as drivers before R470 named it
//
// Hexadecimal digits may be in either case. Selectors are comparable: two selectors that name the
// same thing in the same way are equal, regardless of their spelling. The zero Selector selects
// nothing.
type Selector struct {
	kind selectorKind
	// name is the UUID or the bus ID, normalised, or the pattern; empty for selectors by index.
	name string
	// first and second are the indexes of the GPU and the MIG device, or the instances' IDs.
	first, second int
}

type selectorKind uint8

const (
	byNothing selectorKind = iota
	byGPUIndex
	byGPUUUID
	byPCIBusID
	byMIGIndex
	byMIGUUID
	byInstances
	byModel
)

// ModelSelector selects the GPUs whose product name matches the pattern, as in a NamingRule.
func ModelSelector(pattern Pattern) Selector { return Selector{kind: byModel, name: string(pattern)} }

// inVain returns the warning about a selector that selects none of the GPUs.
func (s Selector) inVain(gpus []GPU) string {
	if s.kind != byModel {
		return fmt.Sprintf("%q names nothing", s)
	}
	var models []string
	for _, gpu := range gpus {
		models = append(models, gpu.Model)
	}
	text := fmt.Sprintf("pattern %q matches no GPU", s)
	if len(models) > 0 {
		text += ", case matters: there is " + quotedList(sorted(models))
	}
	return text
}

// ParseSelector parses a selector. The error quotes s and lists the accepted forms.
func ParseSelector(s string) (Selector, error) {
	gpu, partition, mig := strings.Cut(s, ":")
	first, isIndex := parseIndex(gpu)
	second, isMIGIndex := parseIndex(partition)
	busID, isBusID := normalBusID(s)
	switch selector, isUUID := parseUUIDs(s); {
	case isIndex && !mig:
		return Selector{kind: byGPUIndex, first: first}, nil
	case isIndex && isMIGIndex:
		return Selector{
			kind:   byMIGIndex,
			first:  first,
			second: second,
		}, nil
	case isBusID:
		return Selector{kind: byPCIBusID, name: busID}, nil
	case isUUID:
		return selector, nil
	}
	return Selector{}, fmt.Errorf("%q names no GPU or partition: want a GPU index (0), a MIG index (0:1), "+
		"a UUID (GPU-…, MIG-…) or a PCI bus ID (00000000:3B:00.0)", s)
}

// String returns the selector in its normal form, which ParseSelector parses to an equal one. It is
// empty for the zero Selector; for a ModelSelector it is the pattern.
func (s Selector) String() string {
	switch s.kind {
	case byGPUIndex:
		return strconv.Itoa(s.first)
	case byMIGIndex:
		return fmt.Sprintf("%d:%d", s.first, s.second)
	case byInstances:
		return fmt.Sprintf("MIG-%s/%d/%d", s.name, s.first, s.second)
	}
	return s.name
}

// MatchGPU reports whether the selector names the GPU.
func (s Selector) MatchGPU(g GPU) bool {
	switch s.kind {
	case byGPUIndex:
		return g.Index == s.first
	case byGPUUUID:
		return strings.EqualFold(g.UUID, s.name)
	case byPCIBusID:
		id, ok := normalBusID(g.PCIBusID)
		return ok && id == s.name
	case byModel:
		return Pattern(s.name).Match(g.Model)
	}
	return false
}

// MatchPartition reports whether the selector names partition p of GPU g, or all of g.
func (s Selector) MatchPartition(g GPU, p Partition) bool {
	switch s.kind {
	case byMIGIndex:
		return g.Index == s.first && p.Index == s.second
	case byMIGUUID:
		return strings.EqualFold(p.UUID, s.name)
	case byInstances:
		return strings.EqualFold(g.UUID, s.name) && p.GI == s.first && p.CI == s.second
	}
	return s.MatchGPU(g)
}

const (
	gpuPrefix = "GPU-"
	migPrefix = "MIG-"
)

// parseUUIDs parses the three forms that begin with "GPU-" or "MIG-".
func parseUUIDs(s string) (Selector, bool) {
	if uuid, ok := prefixedUUID(s, gpuPrefix); ok {
		return Selector{kind: byGPUUUID, name: uuid}, true
	}
	if uuid, ok := prefixedUUID(s, migPrefix); ok {
		return Selector{kind: byMIGUUID, name: uuid}, true
	}
	rest, ok := strings.CutPrefix(s, migPrefix)
	if !ok {
		return Selector{}, false
	}
	gpu, instances, _ := strings.Cut(rest, "/")
	uuid, okGPU := prefixedUUID(gpu, gpuPrefix)
	gi, ci, _ := strings.Cut(instances, "/")
	first, okGI := parseIndex(gi)
	second, okCI := parseIndex(ci)
	return Selector{
		kind:   byInstances,
		name:   uuid,
		first:  first,
		second: second,
	}, okGPU && okGI && okCI
}

// parseIndex parses a decimal number without sign and without leading zeros.
func parseIndex(s string) (int, bool) {
	if s == "" || s[0] < '0' || s[0] > '9' || s[0] == '0' && len(s) > 1 {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil
}

// The forms of UUIDs and PCI bus IDs, with hexadecimal digits in either case.
var (
	uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
	busForm  = regexp.MustCompile(`^([0-9a-fA-F]{4})?[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]$`)
)

// prefixedUUID parses a prefix and a UUID, and returns both with the digits in lower case.
func prefixedUUID(s, prefix string) (string, bool) {
	uuid, ok := strings.CutPrefix(s, prefix)
	if !ok || !uuidForm.MatchString(uuid) {
		return "", false
	}
	return prefix + strings.ToLower(uuid), true
}

// normalBusID returns the bus ID as NVML prints it: a domain of eight digits,
// upper case. The kernel and lspci write four digits and lower case.
func normalBusID(s string) (string, bool) {
	if !busForm.MatchString(s) {
		return "", false
	}
	missing := len("00000000:00:00.0") - len(s)
	return strings.Repeat("0", missing) + strings.ToUpper(s), true
}
