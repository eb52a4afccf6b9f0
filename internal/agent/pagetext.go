package agent

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// bytesText is a number of bytes for people, in GiB or MiB.
func bytesText(n any) string {
	value, ok := number(n)
	switch {
	case !ok:
		return "unknown"
	case value >= 1<<30:
		return strconv.FormatFloat(value/(1<<30), 'f', 1, 64) + " GiB"
	default:
		return strconv.FormatFloat(value/(1<<20), 'f', 0, 64) + " MiB"
	}
}

// percentText is a ratio for people.
func percentText(ratio *float64) string {
	if ratio == nil {
		return "unknown"
	}
	return strconv.FormatFloat(*ratio*100, 'f', 0, 64) + " %"
}

// share is the part of the whole, 0 to 1, as <meter> wants it.
func share(part *float64, whole uint64) string {
	if part == nil || whole == 0 {
		return "0"
	}
	return numberText(min(1, *part/float64(whole)))
}

// numberText is a number without an exponent, 0 for an unknown one.
func numberText(n any) string {
	value, _ := number(n)
	return strconv.FormatFloat(value, 'f', -1, 64)
}

func number(n any) (float64, bool) {
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

// causeText says of processes why they are no holder's.
func causeText(cause sharing.UnattributedCause) string {
	switch cause {
	case sharing.CauseNoContainer:
		return "in no container"
	case sharing.CauseNotAllocated:
		return "in containers that hold no device of it"
	case sharing.CauseUnreadable:
		return "that could not be looked at"
	default:
		return string(cause)
	}
}

// positive says that the number is known and more than 0.
func positive(n *float64) bool { return n != nil && *n > 0 }

// breakable is the text in pieces between which a line may end.
func breakable(text string) []string { return strings.SplitAfter(text, ".") }

// sinceText is how long ago something was, in its largest unit.
func sinceText(now, then time.Time) string {
	ago := now.Sub(then)
	switch {
	case ago < time.Second:
		return "now"
	case ago < time.Minute:
		return fmt.Sprintf("%d s ago", ago/time.Second)
	case ago < time.Hour:
		return fmt.Sprintf("%d min ago", ago/time.Minute)
	case ago < 48*time.Hour:
		return fmt.Sprintf("%d h ago", ago/time.Hour)
	default:
		return fmt.Sprintf("%d days ago", ago/(24*time.Hour))
	}
}
