// Package simkubelet is a kubelet for tests and for the demo: the part of one
// that a device plugin can observe, on real unix sockets, in this process.
//
// It serves Registration and PodResources, watches plugins' lists, admits pods
// and gives them devices, writes the kubelet's checkpoint, and can be stopped
// and started again. Where the real kubelet has a quirk that a plugin meets (a
// second stream that outlives its endpoint, a checkpoint that still names dead
// pods), this one has it too; where the real one would panic, or where a plugin
// breaks the contract without being told, this one reports a violation.
//
// Its model is the device manager of Kubernetes 1.36.3 (pkg/kubelet:
// cm/devicemanager, cm/topologymanager, apis/podresources). It runs no
// containers, has no API server and no scheduler: a pod is what AddPod says it
// is.
//
// The words: a process is one life of the kubelet, from Start to Stop; its
// memory dies with it. Pods, counters and the node's status outlive it.
package simkubelet
