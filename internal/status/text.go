package status

import (
	"math"
	"math/bits"
	"strconv"
	"strings"
	"unicode"
)

// Slots is the GPU's number of memory slots, 4 or 8 (see mig.GeometryOf), 0 without partitions. A
// partition's memory is a little less than its part of the GPU's.
func Slots(g GPU) int {
	slots := 0
	for _, u := range g.Units {
		if u.Placement == nil {
			continue
		}
		slots = max(slots, 4, u.Placement.Start+u.Placement.Size)
		if u.Memory > 0 {
			slots = max(slots, int(math.Round(float64(g.Memory)/float64(u.Memory)*float64(u.Placement.Size)*0.9)))
		}
	}
	if slots == 0 {
		return 0
	}
	return min(1<<bits.Len(uint(slots-1)), 8) //nolint:gosec // it is positive
}

// BytesText is a number of bytes for people, in GiB or MiB.
func BytesText(n any) string {
	value, ok := NumberOf(n)
	switch {
	case !ok:
		return "unknown"
	case value >= 1<<30:
		return strconv.FormatFloat(value/(1<<30), 'f', 1, 64) + " GiB"
	default:
		return strconv.FormatFloat(value/(1<<20), 'f', 0, 64) + " MiB"
	}
}

// PercentText is "37 %", or "unknown" for what was not measured.
func PercentText(ratio *float64) string {
	if ratio == nil {
		return "unknown"
	}
	return strconv.FormatFloat(*ratio*100, 'f', 0, 64) + " %"
}

// NumberOf is the number n, a uint64, float64 or *float64; false for an unknown one.
func NumberOf(n any) (float64, bool) {
	switch n := n.(type) {
	case uint64:
		return float64(n), true
	case float64:
		return n, true
	case *float64:
		if n != nil {
			return *n, true
		}
	}
	return 0, false
}

// Plain is the text with U+FFFD for each character that a terminal or a browser obeys
// instead of showing it: control characters but for the end of a line and the tabulator,
// and those that change the direction of text. Names come from the driver and from pods,
// and must not change how the next one reads.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
