package mig_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
)

// names are the written forms and resource names of NVIDIA's device plugin 0.20, except compute instances, which
// it cannot offer, and the list of attributes, which no GPU has yet.
var names = []struct {
	text     string
	profile  mig.Profile
	resource string
}{
	{"1g.5gb", mig.Profile{Compute: 1, Slices: 1, MemoryGB: 5}, "mig-1g.5gb"},
	{"7g.141gb", mig.Profile{Compute: 7, Slices: 7, MemoryGB: 141}, "mig-7g.141gb"},
	{"1c.2g.10gb", mig.Profile{Compute: 1, Slices: 2, MemoryGB: 10}, "mig-1c.2g.10gb"},
	{"1g.5gb+me", mig.Profile{Compute: 1, Slices: 1, MemoryGB: 5, Attributes: "+me"}, "mig-1g.5gb.me"},
	{"1g.24gb+gfx", mig.Profile{Compute: 1, Slices: 1, MemoryGB: 24, Attributes: "+gfx"}, "mig-1g.24gb.gfx"},
	{"1g.24gb+me.all", mig.Profile{Compute: 1, Slices: 1, MemoryGB: 24, Attributes: "+me.all"}, "mig-1g.24gb.me.all"},
	{"1g.24gb-me", mig.Profile{Compute: 1, Slices: 1, MemoryGB: 24, Attributes: "-me"}, "mig-1g.24gb-me"},
	{"1c.2g.12gb+gfx,me", mig.Profile{Compute: 1, Slices: 2, MemoryGB: 12, Attributes: "+gfx,me"}, "mig-1c.2g.12gb.gfx.me"},
}

func TestProfileNames(t *testing.T) {
	for _, row := range names {
		t.Run(row.text, func(t *testing.T) {
			parsed, err := mig.ParseProfile(row.text)
			if err != nil {
				t.Fatal(err)
			}
			if parsed != row.profile {
				t.Errorf("parsed as %#v, want %#v", parsed, row.profile)
			}
			if got := row.profile.String(); got != row.text {
				t.Errorf("String is %q", got)
			}
			if got := row.profile.ResourceName(); got != row.resource {
				t.Errorf("ResourceName is %q, want %q", got, row.resource)
			}
			if row.profile.IsZero() {
				t.Error("is zero")
			}
		})
	}
}

func TestZeroProfile(t *testing.T) {
	var zero mig.Profile
	if !zero.IsZero() || zero.String() != "" || zero.ResourceName() != "" {
		t.Errorf("zero profile: IsZero %v, String %q, ResourceName %q", zero.IsZero(), zero.String(), zero.ResourceName())
	}
}

func TestProfileInstance(t *testing.T) {
	p := profile(t, "1c.2g.10gb+me")
	if got := p.Instance().String(); got != "2g.10gb+me" {
		t.Errorf("instance is %s", got)
	}
}

func TestCompareOrdersSmallerFirst(t *testing.T) {
	want := []string{
		"1g.5gb", "1g.5gb+me", "1g.5gb-me", "1g.10gb",
		"1c.2g.10gb", "1c.2g.10gb+me", "2g.10gb", "1c.3g.20gb", "2c.3g.20gb", "3g.20gb", "4g.20gb", "7g.40gb",
	}
	var profiles []mig.Profile
	for _, text := range want {
		profiles = append(profiles, profile(t, text))
	}
	slices.Reverse(profiles)
	slices.SortFunc(profiles, mig.Profile.Compare)
	var got []string
	for _, p := range profiles {
		got = append(got, p.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	if profiles[0].Compare(profiles[0]) != 0 {
		t.Error("a profile differs from itself")
	}
}

func TestProfileInJSON(t *testing.T) {
	type document struct {
		Whole   mig.Profile         `json:"whole"`
		Part    mig.Profile         `json:"part"`
		ByName  map[mig.Profile]int `json:"byName"`
		Several []mig.Profile       `json:"several"`
	}
	p := profile(t, "1g.5gb+me")
	before := document{Part: p, ByName: map[mig.Profile]int{p: 2}, Several: []mig.Profile{p}}
	text, err := json.Marshal(before)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"whole":"","part":"1g.5gb+me","byName":{"1g.5gb+me":2},"several":["1g.5gb+me"]}`
	if string(text) != want {
		t.Errorf("JSON is %s, want %s", text, want)
	}
	// Unmarshal must also set an empty profile, not keep the old one.
	after := document{Whole: p}
	if err := json.Unmarshal(text, &after); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("round trip (-before +after):\n%s", diff)
	}
	if err := json.Unmarshal([]byte(`{"part":"5gb"}`), &after); err == nil {
		t.Error("a broken profile in JSON is no error")
	}
}

func profile(t testing.TB, text string) mig.Profile {
	t.Helper()
	p, err := mig.ParseProfile(text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

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
		{"slices without unit", "1.5gb", "not of the form"},
		{"compute where slices belong", "1c.5gb", "not of the form"},
		{"slices where compute belongs", "1g.2g.10gb", "not of the form"},
		{"memory in another unit", "1g.5mb", "not of the form"},
		{"upper case", "1G.5GB", "not of the form"},
		{"no number", "g.5gb", "not of the form"},
		{"zero", "0g.5gb", "not of the form"},
		{"leading zero", "1g.05gb", "not of the form"},
		{"negative", "1g.-5gb", "not of the form"},
		{"signed", "1g.+5gb", "not of the form"},
		{"too large", "1g.10000gb", "not of the form"},
		{"another script's digit", "١g.5gb", "not of the form"},
		{"space", "1g.5gb ", "not of the form"},
		{"more compute than slices", "3c.2g.10gb", "3 compute slices are more than the 2"},
		{"sign without attribute", "1g.5gb+", "not of the form"},
		{"empty attribute", "1g.5gb+me,", "not of the form"},
		{"both signs", "1g.5gb+gfx-me", "not of the form"},
		{"both signs, after a comma", "1g.5gb+gfx,-me", "not of the form"},
		{"upper-case attribute", "1g.5gb+ME", "not of the form"},
		{"attribute begins with a digit", "1g.5gb+2me", "not of the form"},
		{"attribute with an empty part", "1g.5gb+me.", "not of the form"},
		{"repeated attribute", "1g.5gb+me,gfx,me", "repeats"},
		{"resource name", "mig-1g.5gb", "not of the form"},
		{"dot for plus", "1g.5gb.me", "not of the form"},
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
