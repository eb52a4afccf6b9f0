// Package cdi holds the specs that internal/cdi writes against the CDI schema.
// It is a module of its own, because the schema comes with an older release of
// the CDI library than the one that Virgate is built with: of the newer ones it
// is a module that the Go module proxy does not have.
package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/schema"
)

func TestSpecsKeepToTheSchema(t *testing.T) {
	specs, err := filepath.Glob("../../internal/cdi/testdata/*.json")
	if err != nil || len(specs) == 0 {
		t.Fatalf("no specs: %v", err)
	}
	for _, spec := range specs {
		if err := schema.BuiltinSchema().ValidateFile(spec); err != nil {
			t.Errorf("%s: %v", spec, err)
		}
		data, err := os.ReadFile(spec)
		if err != nil {
			t.Fatal(err)
		}
		// The schema must be able to say no.
		spoilt := strings.Replace(string(data), `"type":"c"`, `"type":7`, 1)
		if schema.BuiltinSchema().ValidateData([]byte(spoilt)) == nil {
			t.Errorf("%s: a type that is a number goes unseen", spec)
		}
	}
}
