// Package daemon puts the parts of the program together, so that virgate run, the demo and every
// test that needs the whole program run the same one. They differ only in the values of Options.
//
// It decides nothing: internal/agent reads and plans, and cmd/virgate parses the command line.
//
// Read daemon.go first (Options, Run), then profile.go (the source of the profile, and the settings
// that must be known before the driver is opened) and node.go (the GPUs, the lock and the sockets of
// one node). mig.go changes MIG layouts once, on a node that no Virgate serves.
package daemon
