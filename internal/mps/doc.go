// Package mps has NVIDIA's MPS served on a node: one control daemon
// (nvidia-cuda-mps-control) for each GPU or partition that is shared by MPS, so that a fault
// hits the clients of one.
//
// The daemons need rights that the rest of the program does not: Run, in a process of its own
// (virgate mps), starts and watches them, and has their GPUs in the compute mode that they
// need. Client, in virgate run, tells it through a Unix socket for which units daemons are
// wanted, and hears how they are. Which units that are is not decided here.
//
// Below the root directory there are
//
//	virgate.sock         where Run listens
//	compute-modes.json   which compute modes are to be restored
//	<unit>/pipe, log     the sockets and logs of a unit's daemon
//	<unit>/shm           what the unit's daemon and clients have as /dev/shm; see shm.go
//	.ready               exists while all wanted daemons serve
//
// Read client.go for what is said on the socket, supervisor.go for who runs what, unit.go for the life
// of one daemon, shm.go for the memory that it shares with clients, and control.go for how NVIDIA's
// program is used.
package mps
