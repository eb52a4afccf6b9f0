package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// VersionMismatch is why a driver cannot be opened whose libraries and loaded kernel module are of different versions.
// errors.Is finds LibRMVersionMismatch in it.
type VersionMismatch struct {
	// Libraries and Module are their versions, "" when unknown.
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

// Unwrap is the driver's answer.
func (e *VersionMismatch) Unwrap() error { return &Error{Call: "Init", Return: LibRMVersionMismatch} }

// explainMismatch replaces the return code by what it means, where the library has not.
func explainMismatch(err error) error {
	_, explained := errors.AsType[*VersionMismatch](err)
	if explained || !errors.Is(err, LibRMVersionMismatch) {
		return err
	}
	return &VersionMismatch{}
}

// mismatchLimit is how long the versions may differ. While a driver is installed they do, for moments.
const mismatchLimit = 10 * time.Second

// Mismatches find a version mismatch that stays. Then this program has to end: its container may be older than the
// driver, and a new one is given the libraries that the node has now. The zero value has seen none.
type Mismatches struct{ since, last time.Time }

// mismatchGap is how long the driver need not have been opened for a mismatch to be another one.
const mismatchGap = time.Minute

// Lasting takes what became of opening the driver, nil for success, and returns an error when that has been a mismatch
// for 10 s, and until then how long it takes to be one. That is 0 for what is no mismatch.
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
