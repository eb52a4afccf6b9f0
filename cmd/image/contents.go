package main

import (
	"debug/elf"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// file is an entry of the image's only layer.
type file struct {
	// path is where it lies in the image, without a leading slash.
	path string
	// target is set for a symbolic link, data for a file; neither for a folder.
	target string
	data   []byte
	mode   int64
}

func (f file) size() int64 { return int64(len(f.data)) }

// names are the programs that Virgate stands in for when NVIDIA's image is
// replaced by this one and the manifests stay.
var names = []string{"nvidia-device-plugin", "config-manager"}

// contents are the image's files: the program under its names, and what it
// needs of the C library.
func contents(binary string) ([]file, error) {
	program, err := os.ReadFile(binary)
	if err != nil {
		return nil, fmt.Errorf("read program: %w", err)
	}
	files := []file{
		{path: "tmp", mode: 0o1777},
		{path: "etc/passwd", data: []byte("root:x:0:0:root:/:/sbin/nologin\n"), mode: 0o644},
		{path: "usr/bin/virgate", data: program, mode: 0o755},
	}
	for _, name := range names {
		files = append(files, file{path: path.Join("usr/bin", name), target: "virgate"})
	}
	libraries, err := libraries(binary)
	if err != nil {
		return nil, err
	}
	files = append(files, libraries...)
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.path, b.path) })
	return files, nil
}

// loaded is what NVIDIA's libnvidia-ml.so.1 needs beside the program's own
// libraries; on glibc 2.34 and newer all but libm are empty.
var loaded = []string{"libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"}

// libraries are the loader and the libraries of a program that is linked
// dynamically, at the places where the loader looks; none for a static one.
func libraries(binary string) ([]file, error) {
	program, err := elf.Open(binary)
	if err != nil {
		return nil, fmt.Errorf("read program: %w", err)
	}
	defer func() { _ = program.Close() }()
	section := program.Section(".interp")
	if section == nil {
		return nil, nil
	}
	data, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("read program's loader: %w", err)
	}
	loader := strings.TrimRight(string(data), "\x00")
	needed, err := program.ImportedLibraries()
	if err != nil {
		return nil, fmt.Errorf("read program's libraries: %w", err)
	}

	first, err := read(loader)
	if err != nil {
		return nil, err
	}
	files := []file{first}
	seen := map[string]bool{filepath.Base(loader): true}
	for queue := slices.Concat(needed, loaded); len(queue) > 0; queue = queue[1:] {
		name := queue[0]
		if seen[name] {
			continue
		}
		seen[name] = true
		found, err := find(name, program.Machine)
		if err != nil {
			return nil, err
		}
		more, err := importsOf(found)
		if err != nil {
			return nil, err
		}
		queue = append(queue, more...)
		library, err := read(found)
		if err != nil {
			return nil, err
		}
		files = append(files, library)
	}
	return files, nil
}

func importsOf(library string) ([]string, error) {
	f, err := elf.Open(library)
	if err != nil {
		return nil, fmt.Errorf("read library: %w", err)
	}
	defer func() { _ = f.Close() }()
	names, err := f.ImportedLibraries()
	if err != nil {
		return nil, fmt.Errorf("read library %s: %w", library, err)
	}
	return names, nil
}

// find is the library's path on this machine, in a folder where the image's
// loader looks too.
func find(name string, machine elf.Machine) (string, error) {
	triplet := map[elf.Machine]string{elf.EM_X86_64: "x86_64-linux-gnu", elf.EM_AARCH64: "aarch64-linux-gnu"}[machine]
	folders := []string{"/lib/" + triplet, "/usr/lib/" + triplet, "/lib64", "/usr/lib64", "/lib", "/usr/lib"}
	for _, folder := range folders {
		candidate := filepath.Join(folder, name)
		if info, err := os.Stat(candidate); err == nil && info.Mode().IsRegular() {
			return candidate, nil
		}
	}
	return "", fmt.Errorf("find library %s: in none of %s", name, strings.Join(folders, ", "))
}

// read reads a library, following links, and keeps its path.
func read(library string) (file, error) {
	data, err := os.ReadFile(library)
	if err != nil {
		return file{}, fmt.Errorf("read library: %w", err)
	}
	return file{path: strings.TrimPrefix(library, "/"), data: data, mode: 0o755}, nil
}

func libraryNames(files []file) []string {
	var names []string
	for _, f := range files {
		if strings.HasPrefix(f.path, "lib") || strings.HasPrefix(f.path, "usr/lib") {
			names = append(names, path.Base(f.path))
		}
	}
	return names
}
