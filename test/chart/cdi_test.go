package chart

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// TestSpecsKeepToTheSchema validates the specs that internal/cdi writes by the Container Device Interface's
// own schema: schema/schema.json and schema/defs.json of tags.cncf.io/container-device-interface v0.7.2
// (Apache-2.0). The test is in this module because Helm brings the library that reads JSON Schema.
func TestSpecsKeepToTheSchema(t *testing.T) {
	schema, err := jsonschema.NewCompiler().Compile("testdata/cdi/schema.json")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(data []byte) error {
		document, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
		if err != nil {
			t.Fatal(err)
		}
		return schema.Validate(document)
	}
	specs, err := filepath.Glob("../../internal/cdi/testdata/*.json")
	if err != nil || len(specs) == 0 {
		t.Fatalf("no specs: %v", err)
	}
	for _, spec := range specs {
		data, err := os.ReadFile(spec)
		if err != nil {
			t.Fatal(err)
		}
		if err := validate(data); err != nil {
			t.Errorf("%s: %v", spec, err)
		}
		// A wrong type must be noticed.
		if validate(bytes.Replace(data, []byte(`"type":"c"`), []byte(`"type":7`), 1)) == nil {
			t.Errorf("%s: a device node's type is a number, and the schema accepts it", spec)
		}
	}
}
