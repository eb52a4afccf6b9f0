package simnode

import (
	"fmt"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// Load makes a node from a YAML description; testdata/lab.yaml is an example
// that explains each field. file is for messages, and its base name without
// extension is the node's name where the document has none. Errors name the
// field; unknown fields are errors.
func Load(file string, data []byte) (*Node, error) {
	var d description
	if err := yaml.UnmarshalStrict(data, &d); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if d.Name == "" {
		base := filepath.Base(file)
		d.Name = strings.TrimSuffix(base, filepath.Ext(base))
	}
	n, err := d.build()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return n, nil
}
