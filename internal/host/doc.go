// Package host looks at what a node's file system has for containers and has
// the rest made: the driver's device nodes, the minors of MIG capabilities, the
// driver that an installer brings, and CDI specs through a Specs. What comes of
// it is a plugin.Host.
//
// It reads, and writes nothing itself. It knows no driver: the boards come from
// the inventory.
package host
