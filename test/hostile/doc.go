// Package hostile tests the whole program against what a node and its other programs may do to it: full
// disks, another program's kubelet.sock, floods of calls, and the same event a thousand times. Each test
// states what is bounded and what still works; docs/explanation/reliability.md has the figures.
//
// Fuzz tests beside each parser test what that parser must withstand. test/soak tests the program's
// decisions when everything happens at once.
package hostile
