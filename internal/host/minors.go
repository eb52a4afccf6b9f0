package host

import (
	"fmt"
	"strconv"
	"strings"
)

// capability is a GPU instance of a board, or with ci a compute instance in it;
// ci is -1 without. gpu is the board's minor number.
type capability struct{ gpu, gi, ci int }

// parseMinors reads the driver's table of MIG capabilities,
// /proc/driver/nvidia-caps/mig-minors, which says which N the device node
// /dev/nvidia-caps/nvidia-capN of an instance has:
//
//	line = "gpu" minor "/gi" id [ "/ci" id ] "/access " N
//
// The lines "config N" and "monitor N" are for who cuts and watches boards, not
// for containers; they are skipped. The source is NVIDIA's MIG User Guide,
// "Device Nodes and Capabilities".
func parseMinors(data string) (map[capability]int, error) {
	minors := map[capability]int{}
	for line := range strings.Lines(data) {
		path, number, ok := strings.Cut(strings.TrimSpace(line), " ")
		if path == "" || path == "config" || path == "monitor" {
			continue
		}
		minor, readable := parseNumber(number)
		c, known := parseCapability(path)
		if !ok || !readable || !known {
			return nil, fmt.Errorf("MIG minors: %q is no capability", strings.TrimSpace(line))
		}
		minors[c] = minor
	}
	return minors, nil
}

func parseCapability(path string) (capability, bool) {
	c := capability{ci: -1}
	path, ok := strings.CutSuffix(path, "/access")
	parts := strings.Split(path, "/")
	if !ok || len(parts) < 2 || len(parts) > 3 {
		return c, false
	}
	fields := []struct {
		prefix string
		number *int
	}{{"gpu", &c.gpu}, {"gi", &c.gi}, {"ci", &c.ci}}
	for i, part := range parts {
		text, ok := strings.CutPrefix(part, fields[i].prefix)
		if !ok {
			return c, false
		}
		if *fields[i].number, ok = parseNumber(text); !ok {
			return c, false
		}
	}
	return c, true
}

// parseNumber reads a number from 0 as the driver writes them, without signs.
func parseNumber(text string) (int, bool) {
	n, err := strconv.ParseUint(text, 10, 31)
	return int(n), err == nil
}
