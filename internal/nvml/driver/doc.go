// Package driver is nvml.Library over NVIDIA's own library, libnvidia-ml.so.1,
// by way of go-nvml: one thin method a call. It is the only package that needs
// cgo; built without, Open says so.
//
// The library is looked for, and opened, by Init, and anew by every Init after
// the last Shutdown: a driver that is installed, or exchanged for another
// version, while the program runs is found then.
//
// It decides nothing and remembers nothing but handles. A call that the driver
// does not answer blocks: nvml.WithDeadlines is made for that.
package driver
