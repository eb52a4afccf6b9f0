// Package api tests Virgate's internal/configsource against a real API server. It consists of tests
// only.
//
// The server is kube-apiserver of k8s.io/kubernetes v1.36.3. It is a separate process, made from
// this test binary, so that it can be stopped, killed and started again. etcd v3.6 runs inside the
// test. Both listen on the loopback interface only and keep their files in a temporary directory.
// There is no controller and no kubelet: the tests create and change the Nodes and the ConfigMap.
// One part also starts kube-scheduler, for the examples of docs/how-to/schedule.md.
//
// Virgate logs in as an ordinary user that has only the chart's ClusterRole. Each simulated node
// has its own connection; its requests and bytes are counted.
package api
