// Package repeat says how often the tests that repeat themselves do so: a part of the times
// in CI, all of them in make nightly.
package repeat

import "os"

// All says that this is the long run, in which nothing is left out: LONG=1 in the environment.
func All() bool { return os.Getenv("LONG") == "1" }

// Times is how often something is repeated: nightly times in the long run, otherwise ci times.
func Times(ci, nightly int) int {
	if All() {
		return nightly
	}
	return ci
}
