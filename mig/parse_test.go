package mig_test

import (
	"strings"
	"testing"

	"github.com/virgate/virgate/mig"
)

func TestParseProfileTakesOtherSpellings(t *testing.T) {
	for _, row := range []struct{ name, text, want string }{
		{"compute equal to slices", "2c.2g.10gb", "2g.10gb"},
		{"attributes unsorted", "1g.5gb+me,gfx", "1g.5gb+gfx,me"},
		{"attributes removed, unsorted", "1g.5gb-me,gfx", "1g.5gb-gfx,me"},
		{"an attribute not known yet", "1g.5gb+x2.all", "1g.5gb+x2.all"},
		{"the largest numbers", "9999c.9999g.9999gb", "9999g.9999gb"},
	} {
		t.Run(row.name, func(t *testing.T) {
			if got := profile(t, row.text).String(); got != row.want {
				t.Errorf("%s is %s, want %s", row.text, got, row.want)
			}
		})
	}
}

func TestParseProfileRefuses(t *testing.T) {
	for _, row := range []struct{ name, text, because string }{
		{"empty", "", "not of the form"},
		{"one part", "5gb", "not of the form"},
		{"four parts", "1c.1c.1g.5gb", "not of the form"},
		{"slices without unit", "1.5gb", `"1" has no unit "g"`},
		{"compute where slices belong", "1c.5gb", `"1c" has no unit "g"`},
		{"slices where compute belongs", "1g.2g.10gb", `"1g" has no unit "c"`},
		{"memory in another unit", "1g.5mb", `"5mb" has no unit "gb"`},
		{"upper case", "1G.5GB", `"1G" has no unit "g"`},
		{"no number", "g.5gb", `"" is not a number`},
		{"zero", "0g.5gb", `"0" is not a number`},
		{"leading zero", "1g.05gb", `"05" is not a number`},
		{"negative", "1g.-5gb", `"" has no unit "gb"`},
		{"signed", "1g.+5gb", `"" has no unit "gb"`},
		{"too large", "1g.10000gb", `"10000" is not a number`},
		{"another script's digit", "١g.5gb", "is not a number"},
		{"space", "1g.5gb ", `"5gb " has no unit`},
		{"more compute than slices", "3c.2g.10gb", "3 compute slices are more than the 2"},
		{"sign without attribute", "1g.5gb+", `"" is not the name`},
		{"empty attribute", "1g.5gb+me,", `"" is not the name`},
		{"both signs", "1g.5gb+gfx-me", `"gfx-me" is not the name`},
		{"both signs, after a comma", "1g.5gb+gfx,-me", `"-me" is not the name`},
		{"upper-case attribute", "1g.5gb+ME", `"ME" is not the name`},
		{"attribute begins with a digit", "1g.5gb+2me", `"2me" is not the name`},
		{"attribute with an empty part", "1g.5gb+me.", `"me." is not the name`},
		{"repeated attribute", "1g.5gb+me,gfx,me", "repeats"},
		{"resource name", "mig-1g.5gb", "not of the form"},
		{"dot for plus", "1g.5gb.me", `"1g" has no unit "c"`},
	} {
		t.Run(row.name, func(t *testing.T) {
			p, err := mig.ParseProfile(row.text)
			if err == nil {
				t.Fatalf("%q is taken as %s", row.text, p)
			}
			if !p.IsZero() {
				t.Errorf("returns %s beside the error", p)
			}
			if !strings.Contains(err.Error(), row.because) || !strings.HasPrefix(err.Error(), "MIG profile ") {
				t.Errorf("error %q does not say %q", err, row.because)
			}
		})
	}
}

func FuzzParseProfile(f *testing.F) {
	for _, row := range names {
		f.Add(row.text)
	}
	f.Add("2c.2g.10gb+me,gfx")
	f.Add("1g.5gb+")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := mig.ParseProfile(text)
		if err != nil {
			return
		}
		again, err := mig.ParseProfile(p.String())
		if err != nil || again != p {
			t.Errorf("%q is %#v, written %q, read again as %#v, %v", text, p, p, again, err)
		}
		if p.Compute < 1 || p.Compute > p.Slices || p.MemoryGB < 1 {
			t.Errorf("%q is %#v", text, p)
		}
		if strings.ContainsAny(p.ResourceName(), "+,") {
			t.Errorf("%q is no resource name", p.ResourceName())
		}
	})
}
