// Package hostile holds the whole program against what a node and its neighbours
// may do to it: disks that are full, kubelets that are none, floods of calls, and
// the same thing a thousand times. Each test says what is bounded and what is
// still answered; docs/explanation/reliability.md has the figures.
//
// What a single parser must take is with that parser, as a fuzz test; what the
// program decides under a storm is in test/soak.
package hostile
