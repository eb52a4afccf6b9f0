// Package driver implements nvml.Library with NVIDIA's own library, libnvidia-ml.so.1, through
// go-nvml: one thin method for each call. The package needs cgo; without it, Open returns
// ErrNoCgo.
//
// Init finds the library and opens it, and does so again after the last Shutdown. It therefore
// finds a driver that is installed or upgraded while the program runs.
//
// The package decides nothing and stores nothing but handles. A call that the driver does not
// answer blocks; nvml.WithDeadlines handles that.
//
// Read library.go and handle.go first, then the calls in device.go and mig.go. find.go knows where
// to find the library, and forward.go loads it.
package driver
