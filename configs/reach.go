package configs

import "fmt"

// reportUnreachable reports entries that can match no unit on any node, because
// an earlier entry of the same resource takes all of its units.
func reportUnreachable(entries []sharedEntry) {
	all := make(map[string]int)
	for _, e := range entries {
		if line, taken := all[e.share.Resource]; taken {
			e.value.source.problem(e.value.place(), "", fmt.Sprintf(
				"never matches: the entry on line %d takes all devices of %s, put this one before it", line, e.share.Resource))
			continue
		}
		if e.share.Select.All() {
			all[e.share.Resource] = e.value.line
		}
	}
}
