package sharing

import "strings"

// Pattern is a text in which each '*' stands for any run of characters, the
// empty one included. Everything else stands for itself, case matters.
//
// A pattern is not anchored: it matches what contains it, so "A100" matches
// "NVIDIA A100-SXM4-40GB". That is how NVIDIA's device plugin reads the
// patterns of its resources section (api/config/v1/resources.go), and a
// profile written for it must name the same boards here. A '*' at either end
// therefore changes nothing, and the empty pattern matches everything.
type Pattern string

// Match says whether s contains the pattern. It takes time proportional to
// len(s) + len(p).
func (p Pattern) Match(s string) bool {
	// The leftmost place for each literal leaves the most room for those that
	// follow, so there is nothing to go back to.
	for literal := range strings.SplitSeq(string(p), "*") {
		at := strings.Index(s, literal)
		if at < 0 {
			return false
		}
		s = s[at+len(literal):]
	}
	return true
}
