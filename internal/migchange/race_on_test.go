//go:build race

package migchange

// raceDetector is true if the tests run with the race detector. Exhaustive tests of code without goroutines then
// run only some of their cases, as the rest would take ten times as long and show no race.
const raceDetector = true
