// Package cdi keeps the node's CDI specs, which tell a container runtime what a
// container with a GPU or a partition needs: device nodes, the driver's
// libraries, hooks. What goes into a spec comes from NVIDIA's own library
// nvcdi, through Driver, or on a simulated node from Simulated; reading, judging
// and writing specs is the work of the library container-device-interface.
//
// Entries are named as NVIDIA's device plugin names them, in files of the same
// names, so a container that was granted one can restart after either plugin
// has taken the other's place. An entry outlives its unit for as long as a
// running pod may need it: containers restart with the answer that they were
// once given.
//
// The package hands nothing out. It does not watch: who uses it says when to
// look again.
package cdi
