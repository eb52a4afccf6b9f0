package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/virgate/virgate/configs"
)

// Directory has profiles in the files of a directory, as a mounted ConfigMap
// has them: a file's name is the profile's.
type Directory struct{ Path string }

// maxDocument is the size in bytes of the largest document that is read; a
// ConfigMap has 1 MiB in all (Kubernetes, api/validation).
const maxDocument = 4 << 20

// Source is the path.
func (d *Directory) Source() string { return d.Path }

// Documents reads the files. Directories are left out, and names that begin
// with "..", which the kubelet uses for itself, as NVIDIA's config-manager does.
func (d *Directory) Documents() (configs.Documents, error) {
	// A mounted ConfigMap changes by a swap of this link. Through its target all
	// files are of one version.
	path := d.Path
	if target, err := filepath.EvalSymlinks(filepath.Join(path, "..data")); err == nil {
		path = target
	}
	files, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("read profiles: %w", err)
	}
	documents := configs.Documents{}
	for _, file := range files {
		if strings.HasPrefix(file.Name(), "..") {
			continue
		}
		switch data, err := readDocument(filepath.Join(path, file.Name())); {
		case err == nil:
			documents[file.Name()] = string(data)
		case errors.Is(err, errNoFile), errors.Is(err, os.ErrNotExist):
		default:
			return nil, fmt.Errorf("read profiles: %w", err)
		}
	}
	return documents, nil
}

var errNoFile = errors.New("is no regular file")

func readDocument(path string) ([]byte, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s: %w", path, errNoFile)
	}
	return readBounded(path)
}

// readBounded reads a file of at most maxDocument.
func readBounded(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(file, maxDocument+1))
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	if len(data) > maxDocument {
		return nil, fmt.Errorf("%s: longer than %d bytes", path, maxDocument)
	}
	return data, nil
}

// Watch calls changed at once and whenever a file has other content, comes or
// goes.
func (d *Directory) Watch(ctx context.Context, changed func()) error {
	tick := time.NewTicker(readInterval)
	defer tick.Stop()
	last, lastErr := d.Documents()
	changed()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		documents, err := d.Documents()
		if !maps.Equal(documents, last) || (err == nil) != (lastErr == nil) {
			changed()
		}
		last, lastErr = documents, err
	}
}
