package configs

import (
	"strings"
	"testing"

	"github.com/virgate/virgate/sharing"
)

func TestParseFileKinds(t *testing.T) {
	tests := []struct {
		name, document string
		want           Kind
		valid          bool
	}{
		{"empty", "", KindProfile, true},
		{"profile", "version: v1", KindProfile, true},
		{"no mapping", "[]", KindProfile, false},
		{"mig-configs", "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}", KindMIGConfigs, true},
		{"ConfigMap", "apiVersion: v1\nkind: ConfigMap", KindConfigMap, true},
		{"ConfigMap with nothing but data", "data: {}", KindConfigMap, false},
		{"kind before mig-configs", "mig-configs: {}\nkind: ConfigMap", KindConfigMap, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := ParseFile("f", []byte(test.document), nil)
			if got.Kind != test.want || got.Name != "f" || (err == nil) != test.valid {
				t.Errorf("got kind %s and error %v", got.Kind, err)
			}
		})
	}
}

func TestSelect(t *testing.T) {
	const manifest = "apiVersion: v1\nkind: ConfigMap\ndata:\n"
	const layouts = "  layouts: '{version: v1, mig-configs: {a: [{devices: all, mig-enabled: false}]}}'\n"
	const mixed = "  mixed: 'flags: {migStrategy: mixed}'\n"
	tests := []struct {
		name, document, key string
		// want is the strategy of the profile that is selected.
		want sharing.MIGStrategy
		err  string
	}{
		{"profile", "flags: {migStrategy: mixed}", "", sharing.MIGMixed, ""},
		{"profile with a key", "", "any", "", `select "any" from f: it is no ConfigMap and has no keys`},
		{"mig-parted", "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}", "", "", "select from f: it is a mig-parted document, which has no profile"},
		{"the only profile", manifest + layouts + mixed, "", sharing.MIGMixed, ""},
		{"by key", manifest + mixed + "  default: ''\n", "mixed", sharing.MIGMixed, ""},
		{"several", manifest + mixed + "  default: ''\n", "", "", "select from f: several keys hold a profile, choose one of default, mixed"},
		{"no such key", manifest + mixed + "  default: ''\n", "other", "", `select from f: no key "other", there is default, mixed`},
		{"key of layouts", manifest + layouts + mixed, "layouts", "", "select from f: key layouts is a mig-parted document, which has no profile"},
		{"no profile", manifest + layouts, "", "", "select from f: no key holds a profile"},
		{"nothing", manifest, "any", "", "select from f: no key holds a profile"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			file, err := ParseFile("f", []byte(test.document), nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := file.Select(test.key)
			if test.err != "" {
				if err == nil || err.Error() != test.err {
					t.Errorf("error is %v, want %s", err, test.err)
				}
				return
			}
			if err != nil || got.Profile.MIGStrategy != test.want {
				t.Errorf("got strategy %s and error %v", got.Profile.MIGStrategy, err)
			}
		})
	}
}

func TestParseFileAppliesOverrides(t *testing.T) {
	overrides := Overrides{"flags.migStrategy": {Value: "mixed", Source: "--mig-strategy"}}
	for _, document := range []string{"", "apiVersion: v1\nkind: ConfigMap\ndata: {any: ''}"} {
		file, err := ParseFile("f", []byte(document), overrides)
		if err != nil {
			t.Fatal(err)
		}
		config, err := file.Select("")
		if err != nil || config.Profile.MIGStrategy != sharing.MIGMixed {
			t.Errorf("%s: got %s, %v", strings.SplitN(document, "\n", 2)[0], config.Profile.MIGStrategy, err)
		}
	}
}
