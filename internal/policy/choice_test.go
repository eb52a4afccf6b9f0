package policy

import (
	"slices"
	"strings"
	"testing"
	"testing/quick"

	"github.com/google/go-cmp/cmp"
)

func TestChoose(t *testing.T) {
	const label = "nvidia.com/device-plugin.config"
	two, all := []string{"a", "b"}, []Fallback{Named, Single, Empty}
	for _, test := range []struct {
		name string
		wish Wish
		want string
		err  string // part of it; "" for none
	}{
		{"the label", Wish{LabelName: label, Label: "b", Default: "a", Names: two}, "b", ""},
		{"the label names nothing", Wish{LabelName: label, Label: "c", Default: "a", Fallbacks: all, Names: two}, "c", `the node label nvidia.com/device-plugin.config wants "c": it holds a, b`},
		{"the default", Wish{LabelName: label, Default: "a", Fallbacks: all, Names: two}, "a", ""},
		{"the default names nothing", Wish{Default: "c", Fallbacks: all, Names: two}, "c", `the default wants "c": it holds a, b`},
		{"named", Wish{Fallbacks: all, Names: []string{"a", "default"}}, "default", ""},
		{"named, without such a name", Wish{Fallbacks: []Fallback{Named}, Names: two}, "", "no fallback"},
		{"single", Wish{Fallbacks: all, Names: []string{"a"}}, "a", ""},
		{"single, of two", Wish{Fallbacks: []Fallback{Single}, Names: two}, "", "no fallback"},
		{"empty", Wish{Fallbacks: all, Names: two}, "", ""},
		{"the order counts", Wish{Fallbacks: []Fallback{Single, Named}, Names: []string{"default"}}, "default", ""},
		{"empty before named", Wish{Fallbacks: []Fallback{Empty, Named}, Names: []string{"default"}}, "", ""},
		{"nothing wanted", Wish{LabelName: label, Names: two}, "", "the node has no label " + label},
		{"no profiles", Wish{Fallbacks: all}, "", "it holds no profile"},
		{"no profiles, and a label", Wish{Label: "a", Fallbacks: all}, "a", "it holds no profile"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Choose(test.wish)
			if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("got %q, %v; want %q, %q", got, err, test.want, test.err)
			}
		})
	}
}

// TestChooseProperties: what is chosen exists, the label outranks everything,
// and the order of names means nothing.
func TestChooseProperties(t *testing.T) {
	names := []string{"", "a", "b", "c", "default"}
	property := func(label, preset, bits, order uint8) bool {
		w := Wish{Label: names[int(label)%len(names)], Default: names[int(preset)%len(names)]}
		for i, name := range names[1:] {
			if bits>>i&1 == 1 {
				w.Names = append(w.Names, name)
			}
		}
		for i, fallback := range []Fallback{Named, Single, Empty} {
			if order>>i&1 == 1 {
				w.Fallbacks = append(w.Fallbacks, fallback)
			}
		}
		got, err := Choose(w)
		slices.Reverse(w.Names)
		again, errAgain := Choose(w)
		switch {
		case got != again || (err == nil) != (errAgain == nil):
			return false
		case w.Label != "":
			return got == w.Label && (err == nil) == slices.Contains(w.Names, got)
		case err == nil && got != "":
			return slices.Contains(w.Names, got)
		case err == nil:
			return slices.Contains(w.Fallbacks, Empty) && len(w.Names) > 0
		}
		return true
	}
	if err := quick.Check(property, &quick.Config{MaxCount: 20_000}); err != nil {
		t.Error(err)
	}
}

func TestParseFallbacks(t *testing.T) {
	for _, test := range []struct {
		in   string
		want []Fallback
		err  string
	}{
		{"", nil, ""},
		{"named,single", []Fallback{Named, Single}, ""},
		{" empty , named ", []Fallback{Empty, Named}, ""},
		{"named,name", nil, `expected named, single or empty (got "name")`},
		{"single,single", nil, "listed twice"},
	} {
		got, err := ParseFallbacks(test.in)
		if diff := cmp.Diff(test.want, got); diff != "" || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%q: %v, %v", test.in, got, err)
		}
	}
}

func FuzzParseFallbacks(f *testing.F) {
	f.Add("named,single,empty")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseFallbacks(s)
		if err != nil {
			return
		}
		var text []string
		for _, fallback := range got {
			text = append(text, string(fallback))
		}
		again, err := ParseFallbacks(strings.Join(text, ","))
		if err != nil || !slices.Equal(got, again) {
			t.Errorf("%q: %v, then %v, %v", s, got, again, err)
		}
	})
}
