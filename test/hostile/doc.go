// Package hostile tests the whole program against what a node and its other programs may do to it:
// full disks, a kubelet.sock of another program, floods of calls, and the same event a thousand
// times. Each test states what is bounded and what is still answered;
// docs/explanation/reliability.md has the figures.
//
// What a single parser must withstand is tested beside that parser, as a fuzz test. What the
// program decides when everything happens at once is in test/soak.
package hostile
