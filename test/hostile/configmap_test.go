package hostile

import (
	"fmt"
	"strings"
	"testing"
	"unicode"
)

// manifest is a ConfigMap with the one document, as it is written by hand.
func manifest(document string) string {
	return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: profiles}\ndata:\n  a: |\n    " + strings.ReplaceAll(strings.TrimSpace(document), "\n", "\n    ") + "\n"
}

// aliases is a document of a mebibyte in which each line has the one before nine
// times.
func aliases() string {
	var b strings.Builder
	b.WriteString("l0: &l0 [x]\n")
	for i := 1; b.Len() < 1<<20-200; i++ {
		fmt.Fprintf(&b, "l%d: &l%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*l%d,", i-1), 9), ","))
	}
	return b.String()
}

// resources is a document that shares so many resources.
func resources(count int, name func(int) string) string {
	var b strings.Builder
	b.WriteString("version: v1\nsharing:\n  timeSlicing:\n    resources:\n")
	for i := range count {
		fmt.Fprintf(&b, "    - {name: %q, replicas: 2}\n", name(i))
	}
	return b.String()
}

// names is a document that names so many models which the node does not have.
func names(count int) string {
	var b strings.Builder
	b.WriteString("version: v1\nresources:\n  gpus:\n")
	for i := range count {
		fmt.Fprintf(&b, "  - {pattern: \"model %d\", name: nvidia.com/r%d}\n", i, i)
	}
	return b.String()
}

// TestHostileProfiles holds that a profile made to cost much, or to look like
// something else, is refused or served, that the node is served meanwhile, and that the log, the page and the status stay
// short and plain.
func TestHostileProfiles(t *testing.T) {
	for _, test := range []struct {
		name, profile string
		// state is what the profile comes to.
		state string
	}{
		{"a mebibyte of nested aliases", aliases(), "rejected"},
		{"a mebibyte of nested aliases in a ConfigMap", manifest(aliases()[:900_000]), "rejected"},
		{"depth", "a: " + strings.Repeat("[", 1<<19), "rejected"},
		{"ten thousand resources of nothing", resources(10_000, func(i int) string { return fmt.Sprintf("nvidia.com/r%d", i) }), "rejected"},
		{"ten thousand names", names(10_000), "applied"},
		{"ten thousand resources of one name", resources(10_000, func(int) string { return "nvidia.com/gpu" }), "rejected"},
		{"names with control characters", resources(200, func(i int) string { return fmt.Sprintf("nvidia.com/\x1b[2J\u202e\u2066%d\r\x00\a", i) }), "rejected"},
		{"keys with control characters", "\"\\x1b]0;title\\a\\u202e\": 1\n", "rejected"},
		{"more devices than a list can have", replicas(2_000_000_000), "rejected"},
		{"a file of zeros", strings.Repeat("\x00", 1<<20), "rejected"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := start(t, options{profile: replicas(2)})
			p.shows(gpu, 4)
			before, stop := heap(), peak()
			p.write(test.profile)
			if test.state == "rejected" {
				p.says("/metrics", `virgate_config_state{state="rejected"} 1`)
				p.shows(gpu, 4)
				p.admit("pod")
			} else {
				p.shows(gpu, 2) // The resource is not shared any more.
			}
			if most := stop(); most > before+512<<20 {
				t.Errorf("%d MiB more than before", (most-before)>>20)
			}
			for _, path := range []string{"/status", "/api/v1/status", "/metrics"} {
				body := p.get(path)
				if len(body) > 4<<20 {
					t.Errorf("%s has %d bytes", path, len(body))
				}
				if path == "/status" && strings.ContainsFunc(body, func(r rune) bool {
					return r != '\n' && r != '\t' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
				}) {
					t.Errorf("%s has control characters", path)
				}
			}
			if log := p.log.String(); len(log) > 256<<10 || strings.ContainsAny(log, "\x1b\a\u202e") {
				t.Errorf("the log has %d bytes, or what a terminal obeys", len(log))
			}
			p.write(replicas(3))
			if test.state == "rejected" {
				p.shows(gpu, 6)
			}
		})
	}
}
