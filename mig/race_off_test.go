//go:build !race

package mig_test

// raceDetector is true if the tests run with the race detector.
const raceDetector = false
