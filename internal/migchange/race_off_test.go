//go:build !race

package migchange

// raceDetector says that the tests run with the race detector.
const raceDetector = false
