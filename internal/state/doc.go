// Package state keeps what must outlive the program in one small file beside
// the kubelet's sockets, and the lock that lets one Virgate serve at a time.
//
// The file is replaced atomically and synced, has a version and a checksum, and
// consists of named sections, one for each part of the program that has
// something to keep. A file that is torn, foreign or from a later version is
// set aside, never obeyed and never a reason not to start.
package state
