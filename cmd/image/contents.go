package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// file is a file of the image. The image has one layer.
type file struct {
	// path is its path in the image, without a leading slash.
	path string
	// target is set for a symbolic link, data for a regular file, and neither for a folder.
	target string
	data   []byte
	mode   int64
}

func (f file) size() int64 { return int64(len(f.data)) }

// names are the names of NVIDIA's programs, so that manifests for its image work with this one.
// shellNames are the programs that scripts in such manifests call.
var (
	names      = []string{"nvidia-device-plugin", "config-manager", "gpu-feature-discovery", "mps-control-daemon"}
	shellNames = []string{"bash", "cat", "grep", "lsmod", "sleep"}
	// variables are also in NVIDIA's image. They make NVIDIA's runtime give a container the driver;
	// some of NVIDIA's manifests, such as the operator's for GPU feature discovery, do not set
	// them.
	variables = []string{"PATH=/usr/bin", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"}
)

// contents returns the image's files: the program and the shell under their names, the parts of the
// C library that they need, and, from the folder licences, the licences of everything linked into
// them. If shell is "", the image has none.
func contents(binary, shell, licences string) ([]file, error) {
	files := []file{
		{path: "tmp", mode: 0o1777},
		{path: "bin", target: "usr/bin"}, // Scripts use /bin/sh.
		{
			path: "etc/passwd",
			data: []byte("root:x:0:0:root:/:/sbin/nologin\n"),
			mode: 0o644,
		},
	}
	for _, program := range []struct {
		from, name string
		names      []string
	}{{binary, "virgate", names}, {shell, "sh", shellNames}} {
		if program.from == "" {
			continue
		}
		data, err := os.ReadFile(program.from)
		if err != nil {
			return nil, fmt.Errorf("read program: %w", err)
		}
		files = append(files, file{
			path: path.Join("usr/bin", program.name),
			data: data,
			mode: 0o755,
		})
		for _, name := range program.names {
			files = append(files, file{path: path.Join("usr/bin", name), target: program.name})
		}
	}
	for _, name := range []string{"LICENSE", "THIRD_PARTY_LICENSES"} {
		text, err := os.ReadFile(filepath.Join(licences, name))
		if err != nil {
			return nil, fmt.Errorf("read licences: %w", err)
		}
		files = append(files, file{
			path: path.Join("usr/share/doc/virgate", name),
			data: text,
			mode: 0o644,
		})
	}
	libraries, err := libraries(binary)
	if err != nil {
		return nil, err
	}
	files = append(files, libraries...)
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.path, b.path) })
	return files, nil
}

// loaded are the libraries that NVIDIA's libnvidia-ml.so.1 needs in addition to the program's. On
// glibc 2.34 and newer all but libm are empty.
var loaded = []string{"libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"}

// libraries returns the dynamic loader and the libraries of a program, at the paths where the
// loader looks for them; none for a static program.
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

	first, _, err := read(loader)
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
		library, more, err := read(found)
		if err != nil {
			return nil, err
		}
		files, queue = append(files, library), append(queue, more...)
	}
	return files, nil
}

// find returns the library's path on this machine. It searches only folders that the image's loader
// searches too.
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

// read reads a library into a file with the path of its link, and returns the libraries that it
// needs.
func read(library string) (f file, needed []string, err error) {
	data, err := os.ReadFile(library)
	if err != nil {
		return file{}, nil, fmt.Errorf("read library: %w", err)
	}
	content, err := elf.NewFile(bytes.NewReader(data))
	if err == nil {
		needed, err = content.ImportedLibraries()
	}
	if err != nil {
		return file{}, nil, fmt.Errorf("read library %s: %w", library, err)
	}
	return file{
		path: strings.TrimPrefix(library, "/"),
		data: data,
		mode: 0o755,
	}, needed, nil
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

// pack makes a layer of the files and their folders. The same files always give the same layer.
func pack(files []file) (v1.Layer, error) {
	var buffer bytes.Buffer
	writer := tar.NewWriter(&buffer)
	made := map[string]bool{".": true}
	var folder func(name string) error
	folder = func(name string) error {
		if made[name] {
			return nil
		}
		if err := folder(path.Dir(name)); err != nil {
			return err
		}
		made[name] = true
		return writer.WriteHeader(&tar.Header{
			Typeflag: tar.TypeDir,
			Name:     name + "/",
			Mode:     0o755,
			ModTime:  time.Unix(0, 0),
		})
	}
	for _, f := range files {
		err := folder(path.Dir(f.path))
		header := &tar.Header{
			Typeflag: tar.TypeReg,
			Name:     f.path,
			Mode:     f.mode,
			Size:     f.size(),
			ModTime:  time.Unix(0, 0),
		}
		switch {
		case f.target != "":
			header.Typeflag = tar.TypeSymlink
			header.Linkname = f.target
			header.Mode = 0o777
		case f.data == nil:
			header.Typeflag, header.Name = tar.TypeDir, f.path+"/"
			made[f.path] = true
		}
		if err == nil {
			err = writer.WriteHeader(header)
		}
		if err == nil {
			_, err = writer.Write(f.data)
		}
		if err != nil {
			return nil, fmt.Errorf("pack %s: %w", f.path, err)
		}
	}
	if err := writer.Close(); err != nil {
		return nil, fmt.Errorf("pack layer: %w", err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(buffer.Bytes())), nil
	})
	if err != nil {
		return nil, fmt.Errorf("pack layer: %w", err)
	}
	return layer, nil
}
