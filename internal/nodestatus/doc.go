// Package nodestatus tells the Kubernetes API what goes on at this node: Events
// about profiles and GPUs, a condition, annotations and a label of the Node,
// and, if asked to, the removal of resources that Virgate has stopped.
//
// It is told what to say and looks at nothing else of the node. Whatever it
// writes is a patch of what is Virgate's own, never a whole object, so that it
// cannot undo what others write. Nothing waits for it: while the API is away
// the latest report replaces the one before, equal events become one with a
// count, and both are bounded.
//
// Node patches are strategic merge patches and not server-side apply: applying
// to a Node that was deleted would ask for a new, empty one, where a patch is
// answered with 404 (k8s.io/apiserver, pkg/endpoints/handlers/patch.go).
//
// Read reporter.go first: a Reporter, and one loop for each thing that is written,
// with the pauses between writes. node.go has what is written to the Node, events.go
// the Events, client.go the requests.
package nodestatus
