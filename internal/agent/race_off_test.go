//go:build !race

package agent

// raceDetector says that the tests run with the race detector.
const raceDetector = false
