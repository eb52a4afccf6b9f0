//go:build !race

package mig_test

// raceDetector says that the tests run with the race detector.
const raceDetector = false
