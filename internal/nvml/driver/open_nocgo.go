//go:build !cgo

package driver

import "github.com/virgate/virgate/internal/nvml"

// Open returns ErrNoCgo.
func Open(Options) (nvml.Library, error) { return nil, ErrNoCgo }
