package configs

import (
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// normal is the value as settings hold it. For a switch that is true or false,
// of whichever words a variable may use ("1", "t"); a list loses the blanks
// around its items.
func (s Setting) normal(text string) string {
	switch s.Kind {
	case KindBool:
		if on, err := strconv.ParseBool(text); err == nil {
			return strconv.FormatBool(on)
		}
	case KindList, KindNumbers:
		items := listItems(text)
		for i := range items {
			items[i] = strings.TrimSpace(items[i])
		}
		return strings.Join(items, ",")
	}
	return text
}

// possible reports a value that the setting cannot have.
func (s Setting) possible(from *source, text string, at place, shown string) bool {
	var expected string
	switch s.Kind {
	case KindBool:
		if text != "true" && text != "false" {
			expected = "expected true or false"
		}
	case KindEnum, KindList:
		if s.Choices != nil && (text == "" || s.outside(s.Choices, text)) {
			expected = "expected " + alternatives(s.Choices)
		}
	case KindNumbers:
		if slices.ContainsFunc(listItems(text), notNumber) {
			expected = "expected whole numbers from 0"
		}
	case KindPath:
		if text != "" && !strings.HasPrefix(text, "/") {
			expected = "expected an absolute path"
		} else if s.Own && text != "" && path.Clean(text) == "/" {
			expected = "expected a folder below /"
		}
	case KindKeyPrefix:
		if text != "" && !isKeyPrefix(text) {
			expected = "expected a lower-case domain and a slash, such as cdi.k8s.io/"
		}
	case KindDuration:
		if _, err := time.ParseDuration(text); err != nil {
			expected = "expected a duration such as 60s"
		}
	}
	if expected == "" {
		return true
	}
	from.problem(at, shown, expected)
	return false
}

func isKeyPrefix(text string) bool {
	const longest = 253
	domain, ok := strings.CutSuffix(text, "/")
	return ok && len(domain) <= longest && isDomain(domain)
}

// outside says that the value, or an item of the list, is not in the set.
func (s Setting) outside(set []string, text string) bool {
	items := []string{text}
	if s.Kind == KindList || s.Kind == KindNumbers {
		items = listItems(text)
	}
	return slices.ContainsFunc(items, func(item string) bool { return !slices.Contains(set, item) })
}

// listItems splits a list; the empty text has no items.
func listItems(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}

func notNumber(text string) bool {
	_, err := strconv.ParseUint(text, 10, 31)
	return err != nil
}
