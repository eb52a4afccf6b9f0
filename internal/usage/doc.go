// Package usage finds out in which containers the processes on the boards run.
//
// The driver names processes by their IDs on the host. A process's cgroup tells
// its container's ID, and the pods of this node tell whose that is. That takes
// the host's /proc, so a Virgate without the host's process IDs attributes
// nothing, and says so, rather than take one process for another.
//
// It reads, and decides nothing: what is made of it is in sharing.
package usage
