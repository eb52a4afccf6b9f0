// Package configs reads configuration files: the version v1 document of NVIDIA's device plugin with
// Virgate's additions, mig-parted's mig-configs document, Virgate's rules, and Kubernetes
// ConfigMaps that hold such documents.
//
// It is strict: unknown and repeated keys, wrong types and impossible values are errors. All errors
// are reported at once, each with its line, and a document with an error has no result. The package
// is pure: it turns bytes into values and does no I/O. It knows nothing about the node, so a
// setting that merely matches nothing on some node is not an error here.
//
// Read config.go first, then documents.go for where documents come from. keys.json describes every
// key, and settings.go what the descriptions mean; the walker in schema.go checks a document by
// them. schema.json and docs/reference/configuration-keys.md are generated from keys.json. What
// depends on more than one value has a file for each section: names.go (resources, devices and
// exclude), sharing.go, mig.go with migconfigs.go, and health.go. rules.go has the rules that choose
// a profile with Kubernetes label selectors. yaml.go and problem.go keep the positions of values and
// describe their problems.
//
// Keys, flags, variables and defaults are those of k8s-device-plugin v0.20 (api/config/v1,
// cmd/nvidia-device-plugin/main.go).
package configs
