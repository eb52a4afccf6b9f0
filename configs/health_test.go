package configs

import (
	"errors"
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
		{"times", "health: {quietTime: 10s, maxQuietTime: 1m30s}", func(r *sharing.HealthRules) {
			r.QuietTime, r.MaxQuietTime = 10*time.Second, 90*time.Second
		}},
		{"a long quiet time raises the longest", "health: {quietTime: 3h}", func(r *sharing.HealthRules) {
			r.QuietTime, r.MaxQuietTime = 3*time.Hour, 3*time.Hour
		}},
		{"limit", "health: {temperature: {limit: 80}}", func(r *sharing.HealthRules) { r.TemperatureLimit, r.TemperatureSafe = 80, 75 }},
		{"hysteresis", "health: {temperature: {hysteresis: 20}}", func(r *sharing.HealthRules) { r.TemperatureSafe = 70 }},
		{"a limit below the hysteresis", "health: {temperature: {limit: 3}}", func(r *sharing.HealthRules) { r.TemperatureLimit, r.TemperatureSafe = 3, 0 }},
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

// TestHealthVariables holds what DP_DISABLE_HEALTHCHECKS and
// DP_ENABLE_HEALTHCHECKS make of single XIDs.
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

func TestHealthVariableProblem(t *testing.T) {
	_, err := Parse("doc.yaml", nil, Overrides{pathDisableChecks: {Value: "79,most", Source: "$DP_DISABLE_HEALTHCHECKS"}})
	want := Problems{{File: "$DP_DISABLE_HEALTHCHECKS", Path: "health.xids", Value: `"most"`, Message: "expected all, xids or the number of an XID"}}
	var got Problems
	if !errors.As(err, &got) {
		t.Fatalf("error %v", err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}
