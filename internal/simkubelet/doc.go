// Package simkubelet is a kubelet for tests and for the demo. It implements the parts that a device
// plugin can observe, on real Unix sockets, in this process.
//
// It serves Registration and PodResources, reads plugins' lists, admits pods and allocates devices
// to them, and writes the kubelet's checkpoint. It can be stopped and started again. It has the
// peculiarities of the real kubelet that affect a plugin: a second stream that outlives its
// endpoint, a checkpoint that still names pods that have ended. It reports a violation where the
// real one would panic, or where a plugin breaks the API's contract and the real one reports no
// error.
//
// The model is the device manager of Kubernetes 1.36.3 (pkg/kubelet: cm/devicemanager,
// apis/podresources) under topology policy none, and it uses the same names. It also reports a
// violation where the real one would panic under another policy. test/kubernetes/kubelet tests how
// the other policies choose devices, with the kubelet's own code. This kubelet runs no containers
// and has no API server and no scheduler: its pods come from AddPod.
//
// See kubelet.go and process.go for how it starts and stops; registration.go and devices.go for
// plugins and their lists; pods.go and allocation.go for admission; readmission.go for what happens
// to pods after a restart; checkpoint.go, podresources.go and snapshot.go for what can be observed.
package simkubelet
