// Package mig knows MIG: the grammar of profile names, which boards can be cut
// how, where partitions fit, and named layouts. It is pure and imports only the
// standard library; what a real board can do, the driver says.
package mig
