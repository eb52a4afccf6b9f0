// Package configs reads configuration files: the version v1 document of
// NVIDIA's device plugin with Virgate's additions, mig-parted's mig-configs
// document, and a Kubernetes ConfigMap that holds such documents.
//
// It is strict: an unknown or repeated key, a wrong type and an impossible
// value are errors, all of them are reported at once, each with its line, and a
// document with an error yields nothing. It is pure: bytes in, values out, with
// no I/O. It never looks at a node, so what merely matches nothing on some node
// is no error here.
//
// What each key means is in docs/configuration-reference.md, which is made from
// the tables here; which limits hold is in docs/configuration.md. The
// keys, flags, variables and defaults are those of k8s-device-plugin v0.20
// (api/config/v1, cmd/nvidia-device-plugin/main.go).
package configs
