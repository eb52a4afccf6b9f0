// Package repeat shortens long tests in CI. make nightly, which sets LONG=1, plays them whole.
package repeat

import "os"

// All is true with LONG=1 in the environment, as in make nightly.
func All() bool { return os.Getenv("LONG") == "1" }

// Times returns nightly with LONG=1, and ci without.
func Times(ci, nightly int) int {
	if All() {
		return nightly
	}
	return ci
}
