// Package configsource finds the profile that should be in force on this node: in
// a file, or among several in a directory or a ConfigMap by the Node's labels and the
// rules that lie beside them.
//
// It knows where profiles come from and how to hear of a change; what they say is
// for package configs, and what to do about it for the caller. A source says "look
// again", never what has changed, and what was last seen stays while it cannot be
// read.
//
// Read file.go for the simplest sources, then select.go: Choose is all that
// decides, NodeSource applies it. A ConfigMap and a Node's labels (objects.go) are
// kept up to date by a watcher (watch.go) through one connection (client.go).
// lastknowngood.go keeps the profile in force for the next start.
package configsource
