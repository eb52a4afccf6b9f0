package report

import "unicode/utf8"

// cut shortens text to what a message may have, by whole characters, and shows
// that it did.
func cut(text string) string {
	const mark = "…"
	if len(text) <= longestMessage {
		return text
	}
	end := longestMessage - len(mark)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + mark
}
