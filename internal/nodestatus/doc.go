// Package nodestatus reports what happens on this node to the Kubernetes API: Events about profiles
// and GPUs, a condition, annotations and labels of the Node, and, on request, the removal of
// resources that Virgate has stopped.
//
// Its callers pass in what to report; it reads nothing else of the node. To the Node it writes only
// patches of Virgate's own fields, never the whole object, so that it cannot undo what others
// write. Nothing waits for it: while the API is unreachable, the latest report replaces the
// previous one, equal events become one with a count, and both are bounded.
//
// Node patches are strategic merge patches and not server-side apply: applying to a deleted Node
// would request a new, empty one, while a patch is answered with 404 (k8s.io/apiserver,
// pkg/endpoints/handlers/patch.go).
//
// Start with reporter.go: a Reporter runs one loop for each thing that it writes, with pauses between
// writes. node.go has what is written to the Node, events.go the Events, and client.go the requests.
package nodestatus
