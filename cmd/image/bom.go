package main

import (
	"cmp"
	"debug/buildinfo"
	"fmt"
	"os"

	"github.com/CycloneDX/cyclonedx-go"
)

// writeBOM writes the modules that are linked into the program as a CycloneDX
// document. It says what the Go tool recorded in the binary, so it is true of
// that binary and of no other. THIRD_PARTY_LICENSES has the licences.
func (o options) writeBOM(to string) error {
	info, err := buildinfo.ReadFile(o.binary)
	if err != nil {
		return fmt.Errorf("read the build information of %s: %w", o.binary, err)
	}
	bom := cyclonedx.NewBOM()
	bom.Metadata = &cyclonedx.Metadata{Component: component(cyclonedx.ComponentTypeApplication, info.Main.Path, o.version)}
	components := []cyclonedx.Component{*component(cyclonedx.ComponentTypeLibrary, "std", info.GoVersion)}
	for _, module := range info.Deps {
		used := cmp.Or(module.Replace, module)
		components = append(components, *component(cyclonedx.ComponentTypeLibrary, used.Path, used.Version))
	}
	bom.Components = &components
	file, err := os.Create(to)
	if err != nil {
		return err
	}
	if err := cyclonedx.NewBOMEncoder(file, cyclonedx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
		_ = file.Close()
		return fmt.Errorf("write %s: %w", to, err)
	}
	return file.Close()
}

func component(kind cyclonedx.ComponentType, path, version string) *cyclonedx.Component {
	purl := "pkg:golang/" + path + "@" + version
	return &cyclonedx.Component{Type: kind, BOMRef: purl, Name: path, Version: version, PackageURL: purl}
}
