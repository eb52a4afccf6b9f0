// Package e2e installs the chart on a Kubernetes of one node and checks what users would see. etcd,
// kube-apiserver, kube-controller-manager, kube-scheduler and kubelet are linked into the test's
// own binary. containerd, Helm and the CNI plugins are built from their modules. runc is the
// machine's. Virgate runs in its own image, on a simulated node; in one part it loads a driver's
// library.
//
// Everything runs in its own namespaces (mounts, processes, network, name), so that it meets no
// other Kubernetes on the machine and ends with the test, however the test ends. This requires
// root:
//
//	make e2e
//
// Without root or runc the test is skipped, unless E2E=required.
package e2e
