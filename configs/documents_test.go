package configs

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDocuments(t *testing.T) {
	documents := Documents{
		"four":    "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}\n",
		"broken":  "sharing:\n  timeSlicing: {resources: [{name: gpu, replicas: 0}]}\n",
		"torn":    "{",
		"layouts": "version: v1\nmig-configs:\n  mine:\n  - {devices: all, mig-enabled: false}\n",
		"empty":   "",
		"hidden":  "version: v1\n\"mig\\x2dconfigs\":\n  other:\n  - {devices: all, mig-enabled: false}\n",
	}
	if diff := cmp.Diff([]string{"broken", "empty", "four", "torn"}, documents.Profiles()); diff != "" {
		t.Errorf("profiles (-want +got):\n%s", diff)
	}
	got, err := documents.Select("ConfigMap gpu/profiles", "four", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got.Profile.Shares[0].Replicas != 4 || got.String() != "ConfigMap gpu/profiles[four]" || got.Generation != Generation(got.Profile) {
		t.Errorf("got %+v", got)
	}
	if _, ok := got.Documents["layouts"]; !ok || len(got.Documents) != 3 {
		t.Errorf("kept %v, want the profile and the layouts", got.Documents)
	}
	for _, test := range []struct{ name, want string }{
		{"broken", `ConfigMap gpu/profiles[broken]:2: sharing.timeSlicing.resources[0].replicas: expected 1 or more (got 0)`},
		{"torn", "ConfigMap gpu/profiles[torn]:1"},
		{"none", `ConfigMap gpu/profiles: no "none"`},
	} {
		if _, err := documents.Select("ConfigMap gpu/profiles", test.name, nil); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %s", test.name, err, test.want)
		}
	}
}

// TestDocumentsWithWrongLayouts: they matter to a profile that wants one.
func TestDocumentsWithWrongLayouts(t *testing.T) {
	documents := Documents{"a": "", "b": "mig: {manage: true, config: mine}\n", "layouts": "mig-configs: {mine: 3}\n"}
	if _, err := documents.Select("d", "a", nil); err != nil {
		t.Errorf("a profile that needs none: %v", err)
	}
	_, err := documents.Select("d", "b", nil)
	if err == nil || !strings.Contains(err.Error(), "d[layouts]:1") || !strings.Contains(err.Error(), "d[b]:1") {
		t.Errorf("a profile that needs one: %v", err)
	}
}
