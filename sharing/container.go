package sharing

import "cmp"

// Container names a container of a pod on this node.
type Container struct{ Namespace, Pod, Name string }

func compareContainers(a, b Container) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Name, b.Name))
}

// holder is the container that holds the devices.
func (a Allocation) holder() Container { return Container{a.Namespace, a.Pod, a.Container} }
