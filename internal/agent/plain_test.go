package agent

import "testing"

func TestPlain(t *testing.T) {
	for _, row := range []struct{ name, text, want string }{
		{"nothing to do", "ns/pod-1 é 日本 \n\t", "ns/pod-1 é 日本 \n\t"},
		{"colours", "a\x1b[31mb", "a\uFFFD[31mb"},
		{"overwrites the line", "a\rb\bc\x7f", "a\uFFFDb\uFFFDc\uFFFD"},
		{"the eight-bit escape", "a\u009bb", "a\uFFFDb"},
		{"the other way round", "a\u202etxt.exe\u2066b", "a\uFFFDtxt.exe\uFFFDb"},
		{"no UTF-8", "a\xffb", "a\uFFFDb"},
	} {
		if got := Plain(row.text); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}
