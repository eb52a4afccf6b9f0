package status

import (
	"math"
	"math/bits"
	"strconv"
	"strings"
	"unicode"
)

// Slots returns the GPU's number of memory slots, 4 or 8 (see mig.GeometryOf), or 0 without
// partitions. A partition has a little less memory than its part of the GPU's.
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

// BytesText returns a number of bytes for people, in GiB or MiB.
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

// PercentText returns "37 %", or "unknown" if the ratio was not measured.
func PercentText(ratio *float64) string {
	if ratio == nil {
		return "unknown"
	}
	return strconv.FormatFloat(*ratio*100, 'f', 0, 64) + " %"
}

// NumberOf returns the number n, a uint64, float64 or *float64; false if it is unknown.
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

// Plain returns the text with U+FFFD for each character that a terminal or a browser obeys instead of
// showing it: control characters except newline and tab, and characters that change the direction of
// text. Names come from the driver and from pods, and must not change how the text after them reads.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
