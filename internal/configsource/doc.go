// Package configsource finds the profile that should be in force on this node: in a file, or among
// several in a directory or a ConfigMap, by the Node's labels and the rules stored with them.
//
// It knows the sources of profiles and notices changes. Package configs reads their content, and
// the caller acts on it. A source signals only that something has changed, never what. While it
// cannot be read, what was last seen stays.
//
// Read file.go for the simplest sources, then select.go: Choose decides, and NodeSource applies it.
// Package kube keeps a ConfigMap and a Node's labels (objects.go, store.go) up to date.
// lastknowngood.go stores the profile in force for the next start.
package configsource
