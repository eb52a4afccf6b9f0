// Package podresources reads from the kubelet which devices pods hold and which
// devices it has taken in. It never changes anything, and it opens nothing but
// the two places it is told of:
//
//   - PodResources, a gRPC service on a unix socket. It names pods, and leaves
//     out what only a finished init container had, and after a kubelet restart
//     every pod that the kubelet has not heard of again.
//   - The device manager's checkpoint, a file in the device-plugins directory.
//     It leaves nothing out, and names pods by UID. It keeps a pod that is gone
//     until the kubelet has purged it, which answering List makes it do, and
//     has then written again, which a list from a device plugin or an admission
//     makes it do.
//
// So the two together are never less than the truth, and may be more for a
// while.
package podresources
