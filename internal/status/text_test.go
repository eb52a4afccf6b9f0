package status_test

import (
	"testing"

	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
)

func TestSlots(t *testing.T) {
	t.Parallel()
	small := func(start, size int, memory uint64) status.Unit {
		return status.Unit{Placement: &mig.Placement{Start: start, Size: size}, Memory: memory}
	}
	const gib = 1 << 30
	for _, test := range []struct {
		name string
		gpu  status.GPU
		want int
	}{
		{"whole", status.GPU{Memory: 40 * gib, Units: []status.Unit{{}}}, 0},
		{"A100, one slice", status.GPU{Memory: 40 * gib, Units: []status.Unit{small(0, 1, 4864<<20)}}, 8},
		{"A100, half", status.GPU{Memory: 40 * gib, Units: []status.Unit{small(0, 4, 19968<<20)}}, 8},
		{"A30, one slice", status.GPU{Memory: 24 * gib, Units: []status.Unit{small(0, 1, 5952<<20)}}, 4},
		{"A30, all", status.GPU{Memory: 24 * gib, Units: []status.Unit{small(0, 4, 24000<<20)}}, 4},
		{"memory unknown, far", status.GPU{Memory: 40 * gib, Units: []status.Unit{small(6, 1, 0)}}, 8},
		{"nonsense", status.GPU{Memory: 1 << 60, Units: []status.Unit{small(0, 1, 1)}}, 8},
	} {
		if got := status.Slots(test.gpu); got != test.want {
			t.Errorf("%s: %d slots, want %d", test.name, got, test.want)
		}
	}
}

func TestTexts(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ got, want string }{
		{status.BytesText(uint64(3 << 29)), "1.5 GiB"},
		{status.BytesText(float64(7 << 20)), "7 MiB"},
		{status.BytesText((*float64)(nil)), "unknown"},
		{status.PercentText(new(0.126)), "13 %"},
		{status.PercentText(nil), "unknown"},
	} {
		if test.got != test.want {
			t.Errorf("%q, want %q", test.got, test.want)
		}
	}
}

func TestPlain(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ name, text, want string }{
		{"nothing to do", "ns/pod-1 é 日本 \n\t", "ns/pod-1 é 日本 \n\t"},
		{"colours", "a\x1b[31mb", "a\uFFFD[31mb"},
		{"overwrites the line", "a\rb\bc\x7f", "a\uFFFDb\uFFFDc\uFFFD"},
		{"the eight-bit escape", "a\u009bb", "a\uFFFDb"},
		{"the other way round", "a\u202etxt.exe\u2066b", "a\uFFFDtxt.exe\uFFFDb"},
		{"no UTF-8", "a\xffb", "a\uFFFDb"},
	} {
		if got := status.Plain(row.text); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}
