// Package kubelet tests Virgate's plugin package against the kubelet's own code. It consists of
// tests only.
//
// The code is that of k8s.io/kubernetes v1.36.3, in this process: the device manager with its
// registration server, plugin clients and checkpoint, the topology manager under policies none and
// best-effort over two NUMA nodes, and the PodResources v1 server with its rate limit. Virgate runs
// as its real plugin.Manager with the real podresources.Source and, in tests that restart it, the
// real state file and lock. They are connected by Unix sockets in a temporary directory.
//
// The rest of the kubelet is replaced by a few simple parts:
//
//   - Pods are kept in a list. Admission is the topology manager's Admit, one
//     pod at a time, as in the kubelet's loop. There is no scheduler
//     and no runtime: a container start is GetDeviceRunContainerOptions.
//   - A kubelet restart is a new device manager on the same directory. It gets
//     the running containers, and its pod sources are not ready until every
//     running pod has been admitted again.
//   - The five minutes after which a kubelet forgets a stopped plugin are skipped
//     by setting back the time at which it stopped.
//   - Between the plugin clients and the device manager is an observer that
//     records every list before the device manager gets it. What the tests
//     check about lists is what the kubelet received, in that order.
//   - What would kill a kubelet, a panic in admission or in a container start,
//     is caught, ends that kubelet, and fails the test with its stack. Only the
//     tests of naive plugins require such a panic.
//
// The kubelet's constructor is unexported. Only a link name and six private fields (bench_test.go)
// are accessed from outside.
package kubelet
