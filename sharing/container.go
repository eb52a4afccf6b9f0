package sharing

// Container names a container of a pod on this node.
type Container struct{ Namespace, Pod, Name string }
