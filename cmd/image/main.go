// Command image writes a container image of Virgate as an archive that docker load and ctr images
// import accept. It needs no container engine and no registry. The image contains the program, and
// the C libraries of this machine that the program and the driver's library that it loads need.
package main

import (
	"cmp"
	"debug/buildinfo"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func main() {
	var o options
	flag.StringVar(&o.binary, "binary", "bin/virgate", "the program, built with cgo or without")
	flag.StringVar(&o.shell, "shell", "",
		"the program of ./shell, built without cgo, to be the image's sh; empty for none")
	flag.StringVar(&o.output, "output", "bin/virgate-image.tar", "the archive to write")
	flag.StringVar(&o.reference, "reference", "virgate:devel", "the image's name and tag")
	flag.StringVar(&o.licences, "licences", "../..",
		"the folder with LICENSE and THIRD_PARTY_LICENSES, which the image carries")
	flag.StringVar(&o.version, "version", "devel", "the version that the labels say")
	bom := flag.String("bom", "", "write a CycloneDX bill of materials of the program to this file, and no image")
	flag.Parse()
	work := o.write
	if *bom != "" {
		work = func() error { return o.writeBOM(*bom) }
	}
	if err := work(); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

type options struct{ binary, shell, licences, output, reference, version string }

func (o options) write() error {
	reference, err := name.NewTag(o.reference)
	if err != nil {
		return fmt.Errorf("--reference: %w", err)
	}
	files, err := contents(o.binary, o.shell, o.licences)
	if err != nil {
		return err
	}
	layer, err := pack(files)
	if err != nil {
		return err
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return fmt.Errorf("append layer: %w", err)
	}
	image, err = o.configure(image)
	if err != nil {
		return fmt.Errorf("configure image: %w", err)
	}
	// An archive under the final name must be complete.
	partial := o.output + ".partial"
	err = tarball.WriteToFile(partial, reference, image)
	if err == nil {
		err = os.Rename(partial, o.output)
	}
	if err != nil {
		_ = os.Remove(partial) // The first error says more.
		return fmt.Errorf("write %s: %w", o.output, err)
	}
	var size int64
	for _, f := range files {
		size += f.size()
	}
	fmt.Printf("%s: %s, %d files, %.1f MB: %s\n", o.output, o.reference, len(files), float64(size)/1e6,
		strings.Join(libraryNames(files), " "))
	return nil
}

func (o options) configure(image v1.Image) (v1.Image, error) {
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Architecture, config.OS = runtime.GOARCH, "linux"
	config.Created = v1.Time{Time: time.Unix(0, 0).UTC()} // The same program gives the same image.
	config.Config = v1.Config{
		Entrypoint: []string{"/usr/bin/virgate"},
		Cmd:        []string{"run"},
		Env:        variables,
		Labels: map[string]string{
			"org.opencontainers.image.title":       "virgate",
			"org.opencontainers.image.description": "Shares a node's NVIDIA GPUs among pods",
			"org.opencontainers.image.version":     o.version,
			"org.opencontainers.image.licenses":    "Apache-2.0",
		},
	}
	return mutate.ConfigFile(image, config)
}

// writeBOM writes the modules that are linked into the program as a CycloneDX document. It uses
// what the Go tool recorded in the binary, so the document is valid for that binary only.
// THIRD_PARTY_LICENSES has the licences.
func (o options) writeBOM(to string) error {
	info, err := buildinfo.ReadFile(o.binary)
	if err != nil {
		return fmt.Errorf("read the build information of %s: %w", o.binary, err)
	}
	bom := cyclonedx.NewBOM()
	bom.Metadata = &cyclonedx.Metadata{Component: component(cyclonedx.ComponentTypeApplication, info.Main.Path,
		o.version)}
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
	return &cyclonedx.Component{
		Type:       kind,
		BOMRef:     purl,
		Name:       path,
		Version:    version,
		PackageURL: purl,
	}
}
