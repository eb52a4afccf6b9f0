package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// The test's own binary takes Virgate's place. It is linked dynamically if there is a C
// compiler.
func program(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestImage(t *testing.T) {
	output := filepath.Join(t.TempDir(), "image.tar")
	o := options{binary: program(t), shell: program(t), licences: "../..", output: output, reference: "virgate:test", version: "v9"}
	if err := o.write(); err != nil {
		t.Fatal(err)
	}
	image, err := tarball.ImageFromPath(output, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(append(config.Config.Entrypoint, config.Config.Cmd...), " "); got != "/usr/bin/virgate run" {
		t.Errorf("starts %q", got)
	}
	if got := strings.Join(config.Config.Env, " "); got != "PATH=/usr/bin NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility" {
		t.Errorf("variables %q", got)
	}
	if got := config.Config.Labels["org.opencontainers.image.version"]; got != "v9" {
		t.Errorf("version %q", got)
	}
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	entries := map[string]string{}
	for reader := tar.NewReader(content); ; {
		header, err := reader.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, again := entries[header.Name]; again {
			t.Errorf("%s twice", header.Name)
		}
		entries[header.Name] = header.Linkname
	}
	for name, target := range map[string]string{
		"usr/bin/virgate": "", "usr/bin/nvidia-device-plugin": "virgate", "usr/bin/config-manager": "virgate", "tmp/": "",
		"usr/bin/gpu-feature-discovery": "virgate", "usr/bin/mps-control-daemon": "virgate",
		"bin": "usr/bin", "usr/bin/sh": "", "usr/bin/bash": "sh", "usr/bin/cat": "sh", "usr/bin/grep": "sh", "usr/bin/lsmod": "sh", "usr/bin/sleep": "sh",
		"usr/share/doc/virgate/LICENSE": "", "usr/share/doc/virgate/THIRD_PARTY_LICENSES": "",
	} {
		if got, ok := entries[name]; !ok || got != target {
			t.Errorf("%s: %v, target %q, want %q", name, ok, got, target)
		}
	}
}

// The Dockerfile has the same names and variables.
func TestDockerfile(t *testing.T) {
	text, err := os.ReadFile("Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"for name in " + strings.Join(names, " ") + "; do ln -s virgate", "for name in " + strings.Join(shellNames, " ") + "; do ln -s sh ", "ln -s usr/bin /image/bin", "\nENV " + strings.Join(variables, " ") + "\n"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("it has no %q", want)
		}
	}
}

func TestSameFilesSameLayer(t *testing.T) {
	var digests []string
	for range 2 {
		files, err := contents(program(t), program(t), "../..")
		if err != nil {
			t.Fatal(err)
		}
		layer, err := pack(files)
		if err != nil {
			t.Fatal(err)
		}
		digest, err := layer.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest.String())
	}
	if digests[0] != digests[1] {
		t.Errorf("%s and %s", digests[0], digests[1])
	}
}

// A shell is linked dynamically on most machines that have one.
func TestLibrariesOfAProgram(t *testing.T) {
	const shell = "/bin/sh"
	if !asksForLoader(t, shell) {
		t.Skip("this machine's shell is linked statically")
	}
	files, err := libraries(shell)
	if err != nil {
		t.Fatal(err)
	}
	names := libraryNames(files)
	for _, want := range []string{"libc.so.6", "libm.so.6"} {
		if !slices.Contains(names, want) {
			t.Errorf("%s is not in %v", want, names)
		}
	}
	for _, f := range files {
		if !bytes.HasPrefix(f.data, []byte("\x7fELF")) {
			t.Errorf("%s is no program or library", f.path)
		}
	}
}

// asksForLoader reports whether the program names a dynamic loader in the way that the kernel reads
// it.
func asksForLoader(t *testing.T, binary string) bool {
	t.Helper()
	program, err := elf.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = program.Close() }()
	return slices.ContainsFunc(program.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
}

func TestFailures(t *testing.T) {
	folder := t.TempDir()
	text := filepath.Join(folder, "text")
	if err := os.WriteFile(text, []byte("not a program"), 0o600); err != nil {
		t.Fatal(err)
	}
	good := options{binary: program(t), licences: "../..", output: filepath.Join(folder, "out.tar"), reference: "virgate:test"}
	for _, test := range []struct {
		name   string
		change func(*options)
		want   string
	}{
		{"a reference that is none", func(o *options) { o.reference = "Virgate:a b" }, "--reference"},
		{"no program", func(o *options) { o.binary = filepath.Join(folder, "none") }, "read program"},
		{"no shell", func(o *options) { o.shell = filepath.Join(folder, "none") }, "read program"},
		{"a text", func(o *options) { o.binary = text }, "read program"},
		{"no folder", func(o *options) { o.output = filepath.Join(folder, "none", "out.tar") }, "write "},
		{"a folder in its place", func(o *options) { o.output = t.TempDir() }, "write "},
	} {
		t.Run(test.name, func(t *testing.T) {
			o := good
			test.change(&o)
			if err := o.write(); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
			for _, left := range []string{o.output, o.output + ".partial"} {
				if info, err := os.Stat(left); err == nil && info.Mode().IsRegular() {
					t.Errorf("left behind: %s", left)
				}
			}
		})
	}
}

func TestBOM(t *testing.T) {
	output := filepath.Join(t.TempDir(), "bom.json")
	if err := (options{binary: program(t), version: "v9"}).writeBOM(output); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(output)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"bomFormat": "CycloneDX"`, `"version": "v9"`, `"purl": "pkg:golang/std@go1`, `"purl": "pkg:golang/github.com/google/go-containerregistry@v`} {
		if !bytes.Contains(text, []byte(want)) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
}
