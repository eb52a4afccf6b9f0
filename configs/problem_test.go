package configs

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestProblemText(t *testing.T) {
	tests := []struct {
		problem Problem
		want    string
	}{
		{Problem{File: "f", Line: 3, Path: "a.b", Value: "4", Message: "is wrong"}, "f:3: a.b: is wrong (got 4)"},
		{Problem{File: "f", Line: 3, Message: "is wrong"}, "f:3: is wrong"},
		{Problem{File: "--flag", Path: "a", Value: `"x"`, Message: "is wrong"}, `--flag: a: is wrong (got "x")`},
	}
	for _, test := range tests {
		if got := test.problem.Error(); got != test.want {
			t.Errorf("got %s, want %s", got, test.want)
		}
	}
}

func TestProblemsAreSorted(t *testing.T) {
	problems := Problems{
		{File: "b", Line: 1, Message: "4"}, {File: "a", Line: 10, Message: "3"}, {File: "a", Line: 9, Message: "1"}, {File: "a", Line: 9, Message: "2"},
		{File: "a", Line: 10, Message: "3"},
	}
	if got, want := problems.err().Error(), "a:9: 1\na:9: 2\na:10: 3\nb:1: 4"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if err := (Problems{}).err(); err != nil {
		t.Errorf("no problems are the error %v", err)
	}
}

func TestProblemsTextIsBounded(t *testing.T) {
	lines := strings.Split(make(Problems, 250).Error(), "\n")
	if len(lines) != 101 || lines[100] != "and 150 more problems" {
		t.Errorf("%d lines, the last is %q", len(lines), lines[len(lines)-1])
	}
	if lines := strings.Split(make(Problems, 100).Error(), "\n"); len(lines) != 100 || strings.Contains(lines[99], "more") {
		t.Errorf("of 100 problems, %d are shown", len(lines))
	}
}

func TestQuote(t *testing.T) {
	tests := []struct{ text, want string }{
		{"plain", `"plain"`},
		{"\x1b[31m\x00\u202e\n", `"\x1b[31m\x00\u202e\n"`},
		{"\xff", `"\xff"`},
		{strings.Repeat("x", 60), `"` + strings.Repeat("x", 60) + `"`},
		{strings.Repeat("x", 61), `"` + strings.Repeat("x", 60) + `"…`},
		{strings.Repeat("x", 59) + "é", `"` + strings.Repeat("x", 59) + `"…`},
		{strings.Repeat("x", 57) + "😀y", `"` + strings.Repeat("x", 57) + `"…`},
		{strings.Repeat("\x80", 99), `"` + strings.Repeat(`\x80`, 56) + `"…`},
	}
	for _, test := range tests {
		if got := quote(test.text); got != test.want || !utf8.ValidString(got) {
			t.Errorf("quote(%q) = %s, want %s", test.text, got, test.want)
		}
	}
}

func TestNearest(t *testing.T) {
	keys := []string{"replicas", "rename", "name", "devices", "timeSlicing"}
	tests := []struct{ key, want string }{
		{"replica", "replicas"}, {"REPLICAS", "replicas"}, {"repicas", "replicas"}, {"timeslices", "timeSlicing"},
		{"names", "name"}, {"nam", "name"}, {"device", "devices"},
		{"", ""}, {"x", ""}, {"policies", ""}, {strings.Repeat("replicas", 20), ""},
	}
	for _, test := range tests {
		if got := Nearest(test.key, keys); got != test.want {
			t.Errorf("Nearest(%q) = %q, want %q", test.key, got, test.want)
		}
	}
	if got := Nearest("nam", []string{"nama", "namb"}); got != "nama" {
		t.Errorf("of two that are equally near, %q is the nearest", got)
	}
	if got := Nearest("name", append(keys, make([]string, 100)...)); got != "" {
		t.Errorf("of more candidates than are tried, %q is the nearest", got)
	}
}
