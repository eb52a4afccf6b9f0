//go:build !race

package migchange

// raceDetector is true if the tests run with the race detector.
const raceDetector = false
