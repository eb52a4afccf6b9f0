package mig_test

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/mig"
)

// names are the written forms and resource names of NVIDIA's device plugin
// 0.20, but for the compute instances, which it cannot offer, and the list of
// attributes, which no board has yet.
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
	slices.SortFunc(profiles, mig.Compare)
	var got []string
	for _, p := range profiles {
		got = append(got, p.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	if mig.Compare(profiles[0], profiles[0]) != 0 {
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
	// Unmarshal must set the empty profile too, not keep what was there.
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
