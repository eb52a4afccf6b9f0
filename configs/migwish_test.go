package configs

import (
	"strings"
	"testing"

	"github.com/virgate/virgate/sharing"
)

func TestFileMIGLayout(t *testing.T) {
	const layouts = "version: v1\nmig-configs:\n  one: [{devices: all, mig-enabled: false}]\n  two: [{devices: all, mig-enabled: true, mig-devices: {}}]\n"
	indented := "  layouts: |\n    " + strings.ReplaceAll(strings.TrimSpace(layouts), "\n", "\n    ") + "\n"
	const manifest = "apiVersion: v1\nkind: ConfigMap\ndata:\n"
	const profiles = "  a: |\n    mig: {manage: true, config: one, whenBusy: refuse}\n  b: |\n    mig: {config: all-balanced}\n"
	for _, row := range []struct {
		name           string
		document       string
		key, layout    string
		wanted, blocks string
		manage         bool
		when           sharing.WhenBusy
		err            string
	}{
		{"a profile's", "mig: {manage: true, config: all-balanced}", "", "", "all-balanced", "none", true, sharing.Wait, ""},
		{"a profile's without manage", "mig: {config: all-balanced}", "", "", "all-balanced", "none", false, sharing.Wait, ""},
		{"named beside a profile", "mig: {config: all-balanced}", "", "all-enabled", "all-enabled", "none", true, sharing.Wait, ""},
		{"an empty profile", "", "", "", "", "none", false, sharing.Wait, ""},
		{"mig-parted's", layouts, "", "two", "two", "some", true, sharing.Wait, ""},
		{"built in, beside mig-parted's", layouts, "", "all-disabled", "all-disabled", "none", true, sharing.Wait, ""},
		{"mig-parted's, none named", layouts, "", "", "", "", false, "", "f has layouts, name one of one, two"},
		{"mig-parted's, with a key", layouts, "k", "one", "", "", false, "", `select "k" from f: it has no profile`},
		{"mig-parted's, another name", layouts, "", "three", "", "", true, "", `MIG layout "three": no layout has this name`},
		{"a ConfigMap with layouts only", manifest + indented, "", "one", "one", "some", true, sharing.Wait, ""},
		{"a ConfigMap, by key", manifest + indented + profiles, "a", "", "one", "some", true, sharing.Refuse, ""},
		{"a ConfigMap, by key and name", manifest + indented + profiles, "a", "two", "two", "some", true, sharing.Refuse, ""},
		{"a ConfigMap without a key", manifest + indented + profiles, "", "two", "", "", false, "", "choose one of a, b"},
	} {
		t.Run(row.name, func(t *testing.T) {
			file, err := ParseFile("f", []byte(row.document), nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := file.MIGLayout(row.key, row.layout)
			if row.err != "" {
				if err == nil || !strings.Contains(err.Error(), row.err) {
					t.Errorf("error %v, want %q", err, row.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.Name != row.wanted || got.Manage != row.manage || got.WhenBusy != row.when || (got.Blocks == nil) != (row.blocks == "none") {
				t.Errorf("got %+v", got)
			}
		})
	}
}
