//go:build !race

package scenario

// raceDetector says that the tests run with the race detector, so that the
// program is built with it too.
const raceDetector = false
