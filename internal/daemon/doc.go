// Package daemon puts the parts of the program together, so that virgate run, the
// demo and every test that needs the whole program run the same one: they differ in
// a value of Options and in nothing else.
//
// It decides nothing. What is read and planned is for internal/agent, what the
// command line says is for cmd/virgate.
//
// Read daemon.go first (Options, Run, ApplyMIG), then profile.go (where the profile
// comes from, and the settings that must be known before the driver is opened) and
// node.go (the GPUs, the lock and the sockets of one node).
package daemon
