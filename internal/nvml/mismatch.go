package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// VersionMismatch is the error when a driver's libraries and its loaded kernel module have
// different versions, so that the driver cannot be opened. errors.Is finds LibRMVersionMismatch in
// it.
type VersionMismatch struct {
	// Libraries and Module are their versions; empty if unknown.
	Libraries, Module string
}

func (e *VersionMismatch) Error() string {
	const mend = "reload the module, or reboot the node"
	if e.Libraries == "" && e.Module == "" {
		return "the driver's libraries and the loaded kernel module are of different versions: " + mend
	}
	return fmt.Sprintf("the driver's libraries are of version %s and the loaded kernel module is of %s: %s",
		cmp.Or(e.Libraries, "unknown"), cmp.Or(e.Module, "another"), mend)
}

// Unwrap returns the driver's error.
func (e *VersionMismatch) Unwrap() error { return &Error{Call: "Init", Return: LibRMVersionMismatch} }

// explainMismatch replaces the return code by a VersionMismatch, unless the library has already
// done so.
func explainMismatch(err error) error {
	_, explained := errors.AsType[*VersionMismatch](err)
	if explained || !errors.Is(err, LibRMVersionMismatch) {
		return err
	}
	return &VersionMismatch{}
}

// mismatchLimit is how long the versions may differ. They differ briefly while a driver is being
// installed.
const mismatchLimit = 10 * time.Second

// Mismatches detects a version mismatch that does not go away. The program then has to end: its
// container may be older than the driver, and a new container gets the node's current libraries.
// The zero value has seen no mismatch.
type Mismatches struct{ since, last time.Time }

// mismatchGap is the time without attempts to open the driver after which a mismatch counts as a
// new one.
const mismatchGap = time.Minute

// Lasting evaluates the result of opening the driver, nil for success. It returns an error if the
// result has been a mismatch for 10 s. Before that, it returns the time left until then. left is 0
// if there is no mismatch.
func (m *Mismatches) Lasting(err error) (left time.Duration, lasting error) {
	if !errors.Is(err, LibRMVersionMismatch) {
		m.since = time.Time{}
		return 0, nil
	}
	now := time.Now()
	if m.since.IsZero() || now.Sub(m.last) > mismatchGap {
		m.since = now
	}
	m.last = now
	left = mismatchLimit - time.Since(m.since)
	if left > 0 {
		return left, nil
	}
	return 0, fmt.Errorf("%w (it has been so for %s; a new container may have other libraries)", explainMismatch(err),
		mismatchLimit)
}
