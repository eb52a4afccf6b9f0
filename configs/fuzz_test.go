package configs

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"

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

// FuzzParse holds that a document that parses gives a profile that planning can
// rely on, and that one with problems gives none.
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
		if p := config.Process; p.DriverRoot[0] != '/' || p.DevRoot[0] != '/' || p.ContainerDriverRoot[0] != '/' {
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
		if again, err := ParseMIGConfigs("again", []byte(text)); err != nil || !reflect.DeepEqual(layouts, again) {
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
				checkBlock(t, block)
			}
		}
	})
}

func checkBlock(t *testing.T, block sharing.LayoutBlock) {
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
		for _, e := range file.ConfigMap.Entries {
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
	// Nothing that a terminal would obey.
	if text := problems.Error(); strings.ContainsFunc(text, obeyed) {
		t.Errorf("control characters in %q", text)
	}
}

// obeyed says that a terminal does something with the character, but for the end
// of a line.
func obeyed(r rune) bool {
	return r != '\n' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
}

func checkProfile(t *testing.T, p sharing.Profile) {
	t.Helper()
	if !slices.Contains([]sharing.MIGStrategy{sharing.MIGNone, sharing.MIGSingle, sharing.MIGMixed}, p.MIGStrategy) ||
		!slices.Contains([]sharing.DeviceIDStrategy{sharing.ByUUID, sharing.ByIndex}, p.DeviceIDs) ||
		!slices.Contains([]sharing.Policy{sharing.Distributed, sharing.Packed, sharing.Spread}, p.Policy) {
		t.Errorf("strategy %q, IDs by %q, policy %q", p.MIGStrategy, p.DeviceIDs, p.Policy)
	}
	if m := p.MIG; m.WhenBusy != sharing.Wait && m.WhenBusy != sharing.Refuse || m.Name == "" && m.Blocks != nil {
		t.Errorf("the section mig contradicts itself: %+v", m)
	}
	for _, block := range p.MIG.Blocks {
		checkBlock(t, block)
	}
	if len(p.GPUNames) == 0 || p.GPUNames[len(p.GPUNames)-1] != (sharing.Naming{Pattern: "*", Name: "nvidia.com/gpu"}) {
		t.Errorf("the names of GPUs end otherwise: %v", p.GPUNames)
	}
	policies := make(map[string]sharing.Share)
	for _, share := range p.Shares {
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
