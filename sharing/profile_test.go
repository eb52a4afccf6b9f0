package sharing

import (
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestPatternMatch(t *testing.T) {
	const model = "NVIDIA A100-SXM4-40GB"
	for _, test := range []struct {
		name    string
		pattern Pattern
		s       string
		want    bool
	}{
		{"star matches anything", "*", model, true},
		{"star matches nothing", "*", "", true},
		{"empty matches anything", "", model, true},
		{"whole text", "NVIDIA A100-SXM4-40GB", model, true},
		{"not anchored", "A100", model, true},
		{"stars at the ends change nothing", "*A100*", model, true},
		{"case matters", "a100", model, false},
		{"run in the middle", "A100*40GB", model, true},
		{"run may be empty", "A100*-SXM4", model, true},
		{"literals in order", "40GB*A100", model, false},
		{"literals do not overlap", "SXM4-*-40GB", model, false},
		{"first literal missing", "H100*40GB", model, false},
		{"last literal missing", "A100*80GB", model, false},
		{"double star", "A100**40GB", model, true},
		{"earliest literal leaves room", "a*ab", "aab", true},
		{"regexp characters are literal", "1g.5gb", "1gx5gb", false},
		{"partition profile", "1g.5gb", "1g.5gb", true},
		{"not anchored at the end", "1g.5gb", "1g.5gb+me", true},
		{"plus is literal", "1g.5gb+me", "1g.5gb+me", true},
		{"longer than the text", "NVIDIA A100-SXM4-40GB-", model, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.pattern.Match(test.s); got != test.want {
				t.Errorf("Pattern(%q).Match(%q) = %v, want %v", test.pattern, test.s, got, test.want)
			}
		})
	}
}

func TestPatternMatchWhole(t *testing.T) {
	for pattern, profiles := range map[Pattern]map[string]bool{
		"1g.24gb":    {"1g.24gb": true, "1g.24gb-me": false, "1g.24gb+me.all": false, "1c.1g.24gb": false, "11g.24gb": false},
		"1g.24gb*":   {"1g.24gb": true, "1g.24gb-me": true, "2g.24gb": false},
		"*.24gb":     {"1g.24gb": true, "2g.24gb": true, "1g.24gb-me": false},
		"*g.*gb+*":   {"1g.24gb+gfx": true, "1g.24gb": false},
		"1g.24gb+me": {"1g.24gb+me": true, "1g.24gb+me.all": false},
		"*":          {"1g.24gb": true},
		"1*1":        {"1": false, "11": true},
		"":           {"1g.24gb": false},
	} {
		for profile, want := range profiles {
			if got := pattern.MatchWhole(profile); got != want {
				t.Errorf("%q, %s: %v", pattern, profile, got)
			}
		}
	}
}

// FuzzPatternMatch compares with the equivalent regular expression.
func FuzzPatternMatch(f *testing.F) {
	for _, pattern := range []string{"", "*", "A100", "*A100*", "A100*40GB", "a*ab", "**", "1g.5gb", "a*b*a"} {
		for _, s := range []string{"", "NVIDIA A100-SXM4-40GB", "aab", "1g.5gb+me", "abba", "a\nb"} {
			f.Add(pattern, s)
		}
	}
	f.Fuzz(func(t *testing.T, pattern, s string) {
		if !utf8.ValidString(pattern) || !utf8.ValidString(s) {
			t.Skip("regular expressions are UTF-8")
		}
		literals := strings.Split(pattern, "*")
		for i := range literals {
			literals[i] = regexp.QuoteMeta(literals[i])
		}
		expression := "(?s)" + strings.Join(literals, ".*")
		want := regexp.MustCompile(expression).MatchString(s)
		if got := Pattern(pattern).Match(s); got != want {
			t.Errorf("Pattern(%q).Match(%q) = %v, want %v", pattern, s, got, want)
		}
		want = regexp.MustCompile("^(?:" + expression + ")$").MatchString(s)
		if got := Pattern(pattern).MatchWhole(s); got != want {
			t.Errorf("Pattern(%q).MatchWhole(%q) = %v, want %v", pattern, s, got, want)
		}
	})
}
