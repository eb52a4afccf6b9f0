package sharing

import (
	"strconv"
	"strings"
)

const (
	gpuPrefix = "GPU-"
	migPrefix = "MIG-"
)

// parseIndexes reads a GPU index ("0") or a MIG index ("0:1").
func parseIndexes(s string) (Selector, bool) {
	board, partition, mig := strings.Cut(s, ":")
	first, ok := parseIndex(board)
	if !ok || !mig {
		return Selector{kind: byGPUIndex, first: first}, ok
	}
	second, ok := parseIndex(partition)
	return Selector{kind: byMIGIndex, first: first, second: second}, ok
}

// parseUUIDs reads the three forms that begin with "GPU-" or "MIG-".
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
	board, instances, _ := strings.Cut(rest, "/")
	uuid, okBoard := prefixedUUID(board, gpuPrefix)
	gi, ci, _ := strings.Cut(instances, "/")
	first, okGI := parseIndex(gi)
	second, okCI := parseIndex(ci)
	return Selector{kind: byInstances, name: uuid, first: first, second: second}, okBoard && okGI && okCI
}

// parseBusID reads a PCI bus ID with its domain.
func parseBusID(s string) (Selector, bool) {
	id, ok := normalBusID(s)
	return Selector{kind: byPCIBusID, name: id}, ok
}

// parseIndex reads a decimal number without sign and without leading zeros.
func parseIndex(s string) (int, bool) {
	if s == "" || s[0] < '0' || s[0] > '9' || s[0] == '0' && len(s) > 1 {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil
}

// prefixedUUID reads a prefix and a UUID of 8-4-4-4-12 hexadecimal digits and
// returns both with the digits in lower case.
func prefixedUUID(s, prefix string) (string, bool) {
	uuid, ok := strings.CutPrefix(s, prefix)
	if !ok || !shaped(uuid, "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx") {
		return "", false
	}
	return prefix + strings.ToLower(uuid), true
}

// normalBusID returns the bus ID as NVML prints it: a domain of eight digits,
// upper case. The kernel and lspci write four digits and lower case.
func normalBusID(s string) (string, bool) {
	switch {
	case shaped(s, "xxxx:xx:xx.x"):
		return "0000" + strings.ToUpper(s), true
	case shaped(s, "xxxxxxxx:xx:xx.x"):
		return strings.ToUpper(s), true
	default:
		return "", false
	}
}

// shaped says that s has a hexadecimal digit for every x of shape and is equal
// to it elsewhere.
func shaped(s, shape string) bool {
	if len(s) != len(shape) {
		return false
	}
	for i := range len(s) {
		if shape[i] != 'x' {
			if s[i] != shape[i] {
				return false
			}
			continue
		}
		if !strings.ContainsRune("0123456789abcdefABCDEF", rune(s[i])) {
			return false
		}
	}
	return true
}
