// Package podresources reads from the kubelet which devices pods hold and which
// devices it has applied. It changes nothing, and opens only the two places that it
// is told of:
//
//   - PodResources, a gRPC service on a Unix socket. It names pods, and alone has claims (DRA). It leaves out
//     what only a finished init container had, and after a restart of the kubelet
//     every pod that the kubelet has not heard of again.
//   - The device manager's checkpoint, a file in the device-plugins directory. It
//     leaves nothing out, and names pods by UID. It keeps a pod that is gone until
//     the kubelet has looked, which it does when it admits a pod with devices and
//     before it answers PodResources, and then writes the file, as after a list from
//     a device plugin (UpdateAllocatedDevices in pkg/kubelet/cm/devicemanager).
//
// So both together are never less than the truth, and may be more for a while.
//
// Read source.go for the connection, then held.go for the answers, and checkpoint.go
// for the file's format.
package podresources
