package configs

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/sharing"
)

func addSeeds(f *testing.F) {
	f.Helper()
	for _, pattern := range []string{"examples/*.yaml", "testdata/bad/*.yaml", "testdata/cases/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			f.Fatalf("no seeds in %s: %v", pattern, err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Add([]byte(bomb(12)))
	f.Add([]byte(mergeBomb(12)))
}

// FuzzParse checks that a document that parses gives a valid profile, and that one with problems gives none.
func FuzzParse(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		config, err := Parse("f", data, nil)
		if err != nil {
			checkProblems(t, err)
			if !reflect.ValueOf(config).IsZero() {
				t.Errorf("a config with an error: %+v", config)
			}
			return
		}
		checkProfile(t, config.Profile)
		if p := config.Startup; p.DriverRoot[0] != '/' || p.DevRoot[0] != '/' || p.ContainerDriverRoot[0] != '/' {
			t.Errorf("process has a relative path: %+v", p)
		}
	})
}

func FuzzParseMIGConfigs(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		layouts, err := ParseMIGConfigs("f", data)
		if err != nil {
			checkProblems(t, err)
			return
		}
		text, err := FormatMIGConfigs(layouts)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ParseMIGConfigs("again", []byte(text)); err != nil || !cmp.Equal(layouts, again, unplaced) {
			t.Errorf("written as\n%s\nand read as %+v, %v", text, again, err)
		}
		for i, layout := range layouts {
			if i > 0 && layout.Name <= layouts[i-1].Name {
				t.Errorf("layouts are not sorted at %q", layout.Name)
			}
			if len(layout.Blocks) == 0 {
				t.Errorf("%q has no block", layout.Name)
			}
			for _, block := range layout.Blocks {
				checkLayoutBlock(t, block)
			}
		}
	})
}

func checkLayoutBlock(t *testing.T, block sharing.LayoutBlock) {
	t.Helper()
	if block.All == (len(block.Indexes) > 0) || !block.Layout.MIG && len(block.Layout.Partitions) > 0 {
		t.Errorf("block contradicts itself: %+v", block)
	}
	for _, partitions := range block.Layout.Partitions {
		if partitions.Count < 1 || partitions.Profile.IsZero() {
			t.Errorf("block asks for %d of %s", partitions.Count, partitions.Profile)
		}
	}
}

func FuzzParseFile(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := ParseFile("f", data, nil)
		if err != nil {
			checkProblems(t, err)
			return
		}
		for _, e := range file.Entries {
			if e.Kind == KindProfile {
				checkProfile(t, e.Config.Profile)
			}
		}
	})
}

func checkProblems(t *testing.T, err error) {
	t.Helper()
	var problems Problems
	if !errors.As(err, &problems) || len(problems) == 0 {
		t.Fatalf("error is %T: %v", err, err)
	}
	for i, p := range problems {
		if p.File == "" || p.Line < 1 || p.Message == "" {
			t.Errorf("problem is incomplete: %+v", p)
		}
		if i > 0 && p.File == problems[i-1].File && p.Line < problems[i-1].Line {
			t.Errorf("problems are not sorted at %v", p)
		}
	}
	// No character that a terminal would act on.
	if text := problems.Error(); strings.ContainsFunc(text, obeyed) {
		t.Errorf("control characters in %q", text)
	}
}

// obeyed reports whether a terminal acts on the character, except the end of a line.
func obeyed(r rune) bool {
	return r != '\n' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
}

func checkProfile(t *testing.T, p sharing.Profile) {
	t.Helper()
	if !slices.Contains([]sharing.MIGStrategy{sharing.MIGNone, sharing.MIGSingle, sharing.MIGMixed}, p.MIGStrategy) ||
		!slices.Contains([]sharing.DeviceIDStrategy{sharing.ByUUID, sharing.ByIndex}, p.DeviceIDs) ||
		!slices.Contains(sharing.AllocationPolicies(), p.Policy) {
		t.Errorf("strategy %q, IDs by %q, policy %q", p.MIGStrategy, p.DeviceIDs, p.Policy)
	}
	if m := p.MIG; m.WhenBusy != sharing.WaitWhenBusy && m.WhenBusy != sharing.RefuseWhenBusy || m.Name == "" && m.Blocks != nil {
		t.Errorf("the section mig contradicts itself: %+v", m)
	}
	for _, block := range p.MIG.Blocks {
		checkLayoutBlock(t, block)
	}
	if len(p.GPUNames) == 0 || p.GPUNames[len(p.GPUNames)-1] != (sharing.NamingRule{Pattern: "*", Name: "nvidia.com/gpu"}) {
		t.Errorf("the names of GPUs end otherwise: %v", p.GPUNames)
	}
	policies := make(map[string]sharing.ReplicatedResource)
	for _, share := range p.TimeSlicing {
		if share.Path == "" || share.Replicas < 1 || share.Select.Count < 0 || share.Select.Count > 0 && share.Select.List != nil ||
			share.Select.List != nil && len(share.Select.List) == 0 || share.SpreadStrict && share.Policy != sharing.Spread {
			t.Errorf("share contradicts itself: %+v", share)
		}
		name := share.Resource
		if share.Rename != "" {
			name = share.Rename
		}
		for _, n := range []string{share.Resource, name} {
			if full, err := parseResourceName(n); err != nil || full != n {
				t.Errorf("name %q: %v", n, err)
			}
		}
		if first, ok := policies[name]; ok && (first.Policy != share.Policy || first.SpreadStrict != share.SpreadStrict) {
			t.Errorf("%s has two policies", name)
		}
		policies[name] = share
	}
}

// FuzzOverrides checks that a flag or a variable with any text gives a valid profile, or a problem that names the
// flag.
func FuzzOverrides(f *testing.F) {
	settings := slices.Concat(Settings(), EnvOnlySettings())
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

// FuzzParseResourceName checks that an accepted name stays the same when parsed again, and is valid for the
// kubelet.
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

// FuzzParseDeviceFilter checks that an accepted filter can be parsed from its own text.
func FuzzParseDeviceFilter(f *testing.F) {
	for _, text := range []string{"0x20B010DE", "0x20b010de:0x134F10DE", "0x00000000", "0x20B010DE:", ":", "0x+20B010D", "20B010DE", "0x20B010DE:0x00000000", "0x20B010DE:0x134F10DE:0"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		filter, ok := parseDeviceFilter(text)
		if !ok {
			if filter != (sharing.GPUFilter{}) {
				t.Errorf("%q: %v", text, filter)
			}
			return
		}
		if again, ok := parseDeviceFilter(filter.String()); !ok || again != filter {
			t.Errorf("%q is %v, and that is %v, %t", text, filter, again, ok)
		}
	})
}

// FuzzDocuments checks that one document of a ConfigMap does not spoil another, and that a layout named by a
// label is valid or an error.
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
		if names := documents.ProfileNames(); !slices.IsSorted(names) || !slices.Contains(names, "good") {
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
