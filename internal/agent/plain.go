package agent

import (
	"strings"
	"unicode"
)

// Plain is the text with U+FFFD in the place of each character that a terminal
// or a browser obeys instead of showing it: control characters but for the end
// of a line and the tabulator, and those that change the direction of what
// follows. Names come from the driver and from pods, and a name must not change
// how the next one reads.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
