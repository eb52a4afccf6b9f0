// Package podresources reads from the kubelet which devices pods hold and which devices the kubelet
// has applied. It changes nothing, and opens only the two places in its Options:
//
//   - PodResources, a gRPC service on a Unix socket. It names pods, and only it has claims (DRA). It
//     omits what only a finished init container had and, after a restart of the kubelet, every pod
//     that the kubelet has not heard of again.
//   - The device manager's checkpoint, a file in the device-plugins directory. It omits nothing, and
//     names pods by UID. It keeps a pod that is gone until the kubelet checks, which it does when it
//     admits a pod with devices and before it answers PodResources. The kubelet then writes the file,
//     as it does after a list from a device plugin (UpdateAllocatedDevices in
//     pkg/kubelet/cm/devicemanager).
//
// So both together never have less than the truth, but may have more for a while.
//
// Start with source.go for the connection, then read held.go for the answers, and checkpoint.go for
// the file's format.
package podresources
