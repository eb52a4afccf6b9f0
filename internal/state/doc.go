// Package state keeps what must outlive the program in one small file beside the kubelet's sockets
// (file.go, sections.go). It also has the lock that lets only one Virgate serve a node (lock.go).
//
// The file is replaced atomically and synced. It has a version, a checksum and named sections, one
// for each part of the program that has something to keep. A file that is torn, foreign or from a
// later version is renamed and otherwise ignored; it never keeps the program from starting.
package state
