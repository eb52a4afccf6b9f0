// Package api holds Virgate's internal/configsource against a real API server, and is
// nothing but its tests.
//
// What runs is kube-apiserver of k8s.io/kubernetes v1.36.3, as a process of its
// own made from this test binary, so that it can be stopped, killed and started
// again; and etcd v3.6 inside the test. Both listen on the loopback interface
// only and keep their files in a temporary directory. There is no controller
// and no kubelet: the tests make and change the Nodes and the ConfigMap. One part
// starts kube-scheduler too, for the examples of docs/how-to/schedule.md.
//
// Virgate logs in as an ordinary user with the chart's ClusterRole and nothing
// more. Each simulated node has a connection of its own, whose requests and
// bytes are counted.
package api
