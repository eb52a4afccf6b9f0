// Package soak lets everything happen to the whole program at once, for as long
// as one likes: a schedule of operations, which follows from a seed and from
// nothing else, is played on a simulated node, a simulated kubelet and a small
// API server, and the ten invariants of docs/explanation/architecture.md are held against
// what the kubelet saw.
//
// What is right is said by a model that is made from the words of the design.
// It calls none of the program's own code that decides: no planning, no lists,
// no placement of partitions.
//
// The parts: schedule writes the operations, world plays them, pods admits and
// deletes beside it, witness judges each event at the kubelet at once, and judge
// says of a node at rest what is still not as it should be.
package soak
