// Package mps runs NVIDIA's MPS on a node. Each GPU or partition that is shared by MPS has a
// control daemon (nvidia-cuda-mps-control) of its own, so that a fault affects the clients of one
// unit only.
//
// The daemons need privileges that the rest of the program does not. Run is therefore a separate
// process (virgate mps): it starts and watches the daemons, and sets their GPUs to the compute mode
// that they need. Client, in virgate run, tells it through a Unix socket which units need a daemon,
// and receives their states. This package does not decide which units these are.
//
// The root directory contains
//
//	virgate.sock         where Run listens
//	compute-modes.json   the compute modes to restore
//	<unit>/pipe, log     the sockets and logs of a unit's daemon
//	<unit>/shm           the /dev/shm of the unit's daemon and clients; see shm.go
//	.ready               exists while all wanted daemons serve
//
// See client.go for the protocol on the socket, supervisor.go for the units' goroutines, unit.go
// for the life of one daemon, shm.go for the memory that it shares with clients, and control.go for
// the use of NVIDIA's program.
package mps
