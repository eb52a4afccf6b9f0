// Package kubelet holds Virgate's plugin package against the kubelet's own
// code, and is nothing but its tests.
//
// What runs is the real thing of k8s.io/kubernetes v1.36.3, in this process:
// the device manager with its registration server, plugin clients and
// checkpoint, the topology manager under policies none and best-effort over two
// NUMA nodes, and the PodResources v1 server with its rate limit. Virgate is
// its real plugin.Manager with the real podresources.Source and, where it
// restarts, the real state file and lock. They meet on unix sockets in a
// temporary directory.
//
// What stands in for the rest of a kubelet is small and told here:
//
//   - Pods are kept in a list; admission is the topology manager's Admit, one
//     pod at a time, as the kubelet's one loop does it. There is no scheduler
//     and no runtime: a container start is GetDeviceRunContainerOptions.
//   - A kubelet restart is a new device manager on the same directory, told of
//     the running containers, with its pod sources not ready until every
//     running pod has been admitted again.
//   - The five minutes after which a kubelet forgets a stopped plugin pass by
//     setting back the time at which it stopped.
//   - Between the plugin clients and the device manager stands a observer, which
//     writes down every list before the device manager gets it. What the tests
//     say of lists is what the kubelet received, in its order.
//   - What would kill a kubelet, a panic in admission or in a container start,
//     is caught, ends that kubelet, and fails the test with its stack, but for
//     the tests of naive plugins, which require it.
//
// The kubelet's constructor is unexported; a link name and six private fields
// (inside_test.go) are all that is reached into.
package kubelet
