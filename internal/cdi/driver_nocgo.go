//go:build !cgo

package cdi

import (
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/sharing"
)

// Driver is the Source that calls the driver; without cgo it returns ErrNoDriver.
type Driver struct{}

// NewDriver returns a Driver.
func NewDriver(DriverOptions) Driver { return Driver{} }

// Version implements Source.
func (Driver) Version() string { return "" }

// Units implements Source.
func (Driver) Units([]sharing.GPU) (*specs.Spec, error) { return nil, ErrNoDriver }

// Extra implements Source.
func (Driver) Extra(string) (*specs.Spec, error) { return nil, ErrNoDriver }
