package configs

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/sharing"
)

// FuzzOverrides holds that a flag or a variable with any text gives a profile
// that planning can rely on, or a problem that names the flag.
func FuzzOverrides(f *testing.F) {
	settings := slices.Concat(Settings(), Variables())
	for i, s := range settings {
		for _, value := range append(slices.Clone(s.Choices), s.Default, "", "true", "T", "1", "all, xids,79", "-1", " a , b ,", "10h", "/", "relative", "/a/../..", "\x1b[31m", "\xff", "\u202e") {
			f.Add(uint8(i), value)
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, value string) {
		setting := settings[int(which)%len(settings)]
		config, err := Parse("f", nil, Overrides{setting.Path: {Value: value, Source: "--it"}})
		if err == nil {
			checkProfile(t, config.Profile)
			return
		}
		text := err.Error()
		if !strings.Contains(text, "--it") || strings.ContainsFunc(text, obeyed) {
			t.Errorf("%s=%q: the problem does not name the flag, or is not plain: %q", setting.Path, value, text)
		}
	})
}

// FuzzParseResourceName holds that a name which is accepted stays the same when
// it is read again, and has no more than what the kubelet takes.
func FuzzParseResourceName(f *testing.F) {
	for _, name := range []string{"gpu", "nvidia.com/gpu", "nvidia.com/mig-1g.5gb.me", "a/b/c", "/", "/gpu", "a.b/", "requests.x/y", "kubernetes.io/gpu", "x.kubernetes.io/y", "-a/b", "a/b-", "A/b", "nvidia.com/GPU_x.y", strings.Repeat("a", 64), "é", "a\x00"} {
		f.Add(name)
	}
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
	f.Fuzz(func(t *testing.T, text string) {
		full, err := parseResourceName(text)
		if err != nil {
			if full != "" {
				t.Errorf("%q: the name %q with an error", text, full)
			}
			return
		}
		if again, err := parseResourceName(full); err != nil || again != full {
			t.Errorf("%q is %q, and that is %q, %v", text, full, again, err)
		}
		domain, name, found := strings.Cut(full, "/")
		if !found || domain == "" || name == "" || strings.Trim(domain+name, letters) != "" || strings.ToLower(domain) != domain || len(full) > 63 {
			t.Errorf("%q is taken for %q", text, full)
		}
		namesPartition(full)
	})
}

// FuzzParseDeviceFilter holds that a filter which is accepted is read again from
// its own form.
func FuzzParseDeviceFilter(f *testing.F) {
	for _, text := range []string{"0x20B010DE", "0x20b010de:0x134F10DE", "0x00000000", "0x20B010DE:", ":", "0x+20B010D", "20B010DE", "0x20B010DE:0x00000000", "0x20B010DE:0x134F10DE:0"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		filter, err := ParseDeviceFilter(text)
		if err != nil {
			if filter != (sharing.BoardFilter{}) || strings.ContainsFunc(err.Error(), obeyed) {
				t.Errorf("%q: %v, %q", text, filter, err)
			}
			return
		}
		if again, err := ParseDeviceFilter(filter.String()); err != nil || again != filter {
			t.Errorf("%q is %v, and that is %v, %v", text, filter, again, err)
		}
	})
}

// FuzzDocuments holds that one document of a ConfigMap does not spoil another,
// and that a layout which a label names is one that can be cut or an error.
func FuzzDocuments(f *testing.F) {
	layouts := "version: v1\nmig-configs:\n  day:\n  - devices: all\n    mig-enabled: true\n    mig-devices: {1g.5gb: 7}\n"
	managed := "version: v1\nmig: {manage: true, config: all-balanced}\nflags: {migStrategy: mixed}\n"
	for _, label := range []string{"", "day", "all-1g.5gb", "all-disabled", "all-99g.1gb", "all-", "none", "\x1b", "\xff"} {
		f.Add("a", managed, layouts, label)
		f.Add("a", "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}", "mig-configs: 7", label)
	}
	f.Add("..data", "{", "\\", "x")
	f.Fuzz(func(t *testing.T, name, profile, beside, label string) {
		if name == "b" || name == "good" {
			return
		}
		documents := Documents{name: profile, "b": beside, "good": managed}
		if names := documents.Profiles(); !slices.IsSorted(names) || !slices.Contains(names, "good") {
			t.Errorf("profiles %q", names)
		}
		if good, err := documents.Select("here", "good", nil); err != nil || good.Profile.MIG.Name != "all-balanced" {
			t.Errorf("the good one is %+v, %v", good.Profile.MIG, err)
		}
		selected, err := documents.Select("here", name, nil)
		if err != nil {
			return
		}
		checkProfile(t, selected.Profile)
		if kept := selected.Documents; kept[name] != profile || len(kept) > len(documents) {
			t.Errorf("keeps %q", slices.Sorted(maps.Keys(kept)))
		}
		other, err := selected.SelectMIG(label)
		checkProfile(t, other.Profile)
		if err != nil && other.Generation != selected.Generation {
			t.Errorf("the layout %q is refused and changes the profile: %v", label, err)
		}
	})
}
