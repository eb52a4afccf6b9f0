package configs

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

func TestHealth(t *testing.T) {
	tests := []struct {
		name, document string
		change         func(*sharing.HealthRules)
	}{
		{"absent", "", func(*sharing.HealthRules) {}},
		{"empty", "health: {xids: {}, temperature: {}}", func(*sharing.HealthRules) {}},
		{"over the table", "health: {xids: {13: fatal, '94': ignore, 999: ignore}}", func(r *sharing.HealthRules) {
			r.XIDs[13], r.XIDs[94], r.XIDs[999] = sharing.FatalError, sharing.IgnoreError, sharing.IgnoreError
		}},
		{"over what is left to the driver", "health: {xids: {109: fatal}}", func(r *sharing.HealthRules) { delete(r.LeftToDriver, 109) }},
		{"others", "health: {xids: {other: ignore}, ecc: fatal}", func(r *sharing.HealthRules) {
			r.OtherXIDs, r.DoubleBitECC = sharing.IgnoreError, sharing.FatalError
		}},
		{"row remapping", "health: {rowRemap: true}", func(r *sharing.HealthRules) { r.RowRemap = true }},
		{"fabric", "health: {fabric: ignore}", func(r *sharing.HealthRules) { r.IgnoreFabric = true }},
		{"times", "health: {recoverAfter: 10s, maxRecoverAfter: 1m30s}", func(r *sharing.HealthRules) {
			r.RecoverAfter, r.MaxRecoverAfter = 10*time.Second, 90*time.Second
		}},
		{"the older names", "health: {quietTime: 10s, maxQuietTime: 1m30s}", func(r *sharing.HealthRules) {
			r.RecoverAfter, r.MaxRecoverAfter = 10*time.Second, 90*time.Second
		}},
		{"a long recovery delay raises the longest", "health: {recoverAfter: 3h}", func(r *sharing.HealthRules) {
			r.RecoverAfter, r.MaxRecoverAfter = 3*time.Hour, 3*time.Hour
		}},
		{"limit", "health: {temperature: {limit: 80}}", func(r *sharing.HealthRules) {
			r.TemperatureLimit, r.TemperatureSafe, r.BoardTemperature = 80, 75, false
		}},
		{"hysteresis", "health: {temperature: {hysteresis: 20}}", func(r *sharing.HealthRules) { r.TemperatureSafe = 70 }},
		{"a limit below the hysteresis", "health: {temperature: {limit: 3}}", func(r *sharing.HealthRules) {
			r.TemperatureLimit, r.TemperatureSafe, r.BoardTemperature = 3, 0, false
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			want := sharing.DefaultHealthRules()
			test.change(&want)
			if diff := cmp.Diff(want, parse(t, test.document).Profile.Health); diff != "" {
				t.Errorf("rules (-want +got):\n%s", diff)
			}
		})
	}
}

// TestHealthVariables checks how DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS affect single XIDs.
func TestHealthVariables(t *testing.T) {
	const (
		ignore, suspect, fatal = sharing.IgnoreError, sharing.SuspectError, sharing.FatalError
	)
	tests := []struct {
		name, document, disable, enable string
		want                            map[uint64]sharing.ErrorAction
		other, ecc                      sharing.ErrorAction
	}{
		{"neither", "", "", "", map[uint64]sharing.ErrorAction{13: ignore, 79: fatal, 94: suspect}, suspect, suspect},
		{"some disabled", "", "94, 79", "", map[uint64]sharing.ErrorAction{13: ignore, 79: ignore, 94: ignore, 95: fatal}, suspect, suspect},
		{"all disabled", "", "ALL", "", map[uint64]sharing.ErrorAction{79: ignore, 94: ignore, 500: ignore}, ignore, ignore},
		{"xids disabled", "", "48,xids", "", map[uint64]sharing.ErrorAction{79: ignore, 94: ignore, 500: ignore}, ignore, ignore},
		{"over the document", "health: {xids: {13: fatal}}", "13", "", map[uint64]sharing.ErrorAction{13: ignore}, suspect, suspect},
		{"enabled over disabled", "", "all", "79,94,500", map[uint64]sharing.ErrorAction{79: fatal, 94: suspect, 500: suspect, 95: ignore}, ignore, ignore},
		{"an application error", "", "", "13", map[uint64]sharing.ErrorAction{13: suspect, 31: ignore}, suspect, suspect},
		{"what the document says stays", "health: {xids: {13: fatal, 79: suspect}}", "", "13,79", map[uint64]sharing.ErrorAction{13: fatal, 79: suspect}, suspect, suspect},
		{"all enabled", "health: {xids: {79: ignore, other: ignore}, ecc: ignore}", "", "all", map[uint64]sharing.ErrorAction{13: suspect, 79: fatal}, suspect, suspect},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			config, err := Parse("doc.yaml", []byte(test.document), Overrides{
				pathDisableChecks: {Value: test.disable, Source: "$DP_DISABLE_HEALTHCHECKS"},
				pathEnableChecks:  {Value: test.enable, Source: "$DP_ENABLE_HEALTHCHECKS"},
			})
			if err != nil {
				t.Fatal(err)
			}
			rules := config.Profile.Health
			for code, want := range test.want {
				if got := rules.XID(code); got != want {
					t.Errorf("XID %d: %s, want %s", code, got, want)
				}
			}
			if rules.OtherXIDs != test.other || rules.DoubleBitECC != test.ecc {
				t.Errorf("others %s, ECC %s, want %s and %s", rules.OtherXIDs, rules.DoubleBitECC, test.other, test.ecc)
			}
		})
	}
}

// TestHealthVariableAndDriver checks that an XID left to the driver by default is left to it again if a variable
// enables it over a document or another variable that ignores it.
func TestHealthVariableAndDriver(t *testing.T) {
	tests := []struct {
		name, document, disable, enable string
		want                            bool
	}{
		{"neither", "", "", "", true},
		{"enabled", "", "", "109", true},
		{"the document ignores it", "health: {xids: {109: ignore}}", "", "109", true},
		{"the document ignores it, all enabled", "health: {xids: {109: ignore}}", "", "xids", true},
		{"disabled and enabled", "", "all", "109", true},
		{"the document wants it fatal", "health: {xids: {109: fatal}}", "", "109", false},
		{"the document wants it suspect", "health: {xids: {109: suspect}}", "", "all", false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			config, err := Parse("doc.yaml", []byte(test.document), Overrides{
				pathDisableChecks: {Value: test.disable, Source: "$DP_DISABLE_HEALTHCHECKS"},
				pathEnableChecks:  {Value: test.enable, Source: "$DP_ENABLE_HEALTHCHECKS"},
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := config.Profile.Health.LeftToDriver[109]; got != test.want {
				t.Errorf("left to the driver: %t", got)
			}
		})
	}
}

// TestHealthVariablesAndRowRemap checks that all, but not single XIDs, turn off health.rowRemap.
func TestHealthVariablesAndRowRemap(t *testing.T) {
	for disable, want := range map[string]bool{"": true, "63": true, "all": false, "xids": false} {
		config, err := Parse("doc.yaml", []byte("health: {rowRemap: true}"), Overrides{pathDisableChecks: {Value: disable, Source: "$DP_DISABLE_HEALTHCHECKS"}})
		if err != nil {
			t.Fatal(err)
		}
		if config.Profile.Health.RowRemap != want {
			t.Errorf("%q: a pending row remapping is a fault: %t", disable, !want)
		}
	}
}

// TestHealthVariableMalformed checks that the rest of a variable applies if a part of it is no XID, while a
// document's health.xids stays strict.
func TestHealthVariableMalformed(t *testing.T) {
	for value, malformed := range map[string][]string{
		"79, most,95": {"most"}, "-79,79,95": {"-79"}, "79;95,79,95,": {"79;95"}, "0,95,79,1e3": {"0", "1e3"}, " 79 ,,95": nil,
		"79,95,18446744073709551615": nil, "79,95,18446744073709551616": {"18446744073709551616"},
	} {
		for variable, path := range map[string]string{"$DP_DISABLE_HEALTHCHECKS": pathDisableChecks, "$DP_ENABLE_HEALTHCHECKS": pathEnableChecks} {
			document := "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 3}]}}"
			want := map[uint64]sharing.ErrorAction{79: sharing.IgnoreError, 95: sharing.IgnoreError}
			if path == pathEnableChecks {
				document = "health: {xids: {79: ignore, 95: ignore}}\n" + document
				want = map[uint64]sharing.ErrorAction{79: sharing.FatalError, 95: sharing.FatalError}
			}
			config, err := Parse("doc.yaml", []byte(document), Overrides{path: {Value: value, Source: variable}})
			if err != nil || len(config.Profile.TimeSlicing) != 1 {
				t.Fatalf("%s=%s: %v", variable, value, err)
			}
			for code, action := range want {
				if got := config.Profile.Health.XID(code); got != action {
					t.Errorf("%s=%s: XID %d: %s, want %s", variable, value, code, got, action)
				}
			}
			var noted []string
			for _, note := range config.Notes {
				if strings.HasSuffix(note.Message, " is ignored: expected all, xids or the number of an XID") {
					noted = append(noted, note.Message)
				}
			}
			if len(noted) != len(malformed) {
				t.Errorf("%s=%s: notes are %q", variable, value, noted)
			}
			for i, item := range malformed {
				if i < len(noted) && !strings.HasPrefix(noted[i], variable+": "+strconv.Quote(item)) {
					t.Errorf("%s=%s: %s", variable, value, noted[i])
				}
			}
		}
	}
	if _, err := Parse("doc.yaml", []byte("health: {xids: {most: ignore}}"), nil); err == nil {
		t.Error("a document with a malformed XID is accepted")
	}
}
