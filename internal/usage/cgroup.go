package usage

import (
	"iter"
	"regexp"
	"strings"
)

// cgroups finds the container in a process's cgroup file.
type cgroups struct{ pod, id *regexp.Regexp }

// newCgroups compiles the grammar of the two marks that count in a path:
//
//	pod       = ( start | "/" | "-" ) "pod" ( UUID with "-" or "_" | 32 hex digits )
//	container = 64 hex digits, between anything else
//
// The kubelet names a pod's cgroup by the pod's UID, in which its systemd driver
// writes "_" for "-"; a static pod has a hash of 32 digits instead
// (kubernetes v1.36, pkg/kubelet/cm/pod_container_manager_linux.go). The runtimes
// add the container's ID in their own ways, which all have its 64 digits.
func newCgroups() cgroups {
	return cgroups{
		pod: regexp.MustCompile(`(?:^|[/-])pod(?:[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:[^0-9a-f]|$)`),
		id:  regexp.MustCompile(`(?:^|[^0-9a-f])([0-9a-f]{64})(?:[^0-9a-f]|$)`),
	}
}

// container is the ID of the pod's container in which the process runs, and ""
// for a process that runs in none. file is /proc/PID/cgroup, of either version:
// lines of hierarchy, controllers and path (cgroups(7)).
//
// It is the first ID after the first pod: a runtime inside the container adds
// more after it, and a node that is a container itself has its own before it.
func (c cgroups) container(file string) string {
	for path := range paths(file) {
		pod := c.pod.FindStringIndex(path)
		if pod == nil {
			continue
		}
		// The pod's mark ends with what may be the beginning of the ID's.
		if id := c.id.FindStringSubmatch(path[pod[1]-1:]); id != nil {
			return id[1]
		}
	}
	return ""
}

// inPod says that the process belongs to a pod, in a container or beside them.
func (c cgroups) inPod(file string) bool {
	for path := range paths(file) {
		if c.pod.MatchString(path) {
			return true
		}
	}
	return false
}

// paths are those of the file's lines.
func paths(file string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for line := range strings.Lines(file) {
			parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
			if len(parts) == 3 && !yield(parts[2]) {
				return
			}
		}
	}
}
