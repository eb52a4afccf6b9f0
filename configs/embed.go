package configs

import (
	"embed"
	"io/fs"
)

//go:embed examples/*.yaml
var examples embed.FS

// Examples has the example documents by path: "examples/mig-mixed.yaml". Each
// is a device-plugin document that parses without overrides.
func Examples() fs.FS { return examples }
