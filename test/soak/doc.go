// Package soak does everything to the whole program at once, for as long as desired. A schedule of
// operations, which depends only on a seed, runs on a simulated node, a simulated kubelet and a small API
// server. Invariants of docs/explanation/architecture.md are checked against what the kubelet saw.
//
// A model written from the text of the design decides what is right. It calls none of the program's code
// that decides: no planning, no lists, no placement of partitions.
//
// The parts: scheduler writes the operations, world performs them, pods admits and deletes pods at the same
// time, observer checks each event at the kubelet at once, and judge lists what is still wrong on a node at
// rest.
package soak
