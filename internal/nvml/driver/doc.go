// Package driver is nvml.Library over NVIDIA's own library, libnvidia-ml.so.1, by
// way of go-nvml: one thin method a call. It is the only package that needs cgo;
// built without, Open says so.
//
// Init looks for the library and opens it, and does so again after the last
// Shutdown: a driver that is installed, or replaced by another version, while the
// program runs is found then.
//
// It decides nothing and remembers nothing but handles. A call that the driver
// does not answer blocks; nvml.WithDeadlines handles that.
//
// Read library.go and handle.go first, then device.go and mig.go with the calls;
// find.go says where the library is looked for, forward.go how it is loaded.
package driver
