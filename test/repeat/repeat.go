// Package repeat shortens long tests in CI. make nightly sets LONG=1 and so runs them in full.
package repeat

import "os"

// All reports whether LONG=1 is in the environment, as in make nightly.
func All() bool { return os.Getenv("LONG") == "1" }

// Times returns nightly with LONG=1, and ci without.
func Times(ci, nightly int) int {
	if All() {
		return nightly
	}
	return ci
}
