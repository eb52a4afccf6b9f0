//go:build race

package migchange

// raceDetector is true if the tests run with the race detector. Exhaustive tests of code without goroutines would
// take ten times as long with it and show no race.
const raceDetector = true
