//go:build race

package migchange

// raceDetector says that the tests run with the race detector. Exhaustive tests
// of code without goroutines then look at a part of their cases: the detector
// finds nothing in the rest, and takes ten times as long.
const raceDetector = true
