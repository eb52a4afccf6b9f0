package main

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

// TestMIGPlanIsWhatApplyDoes checks that mig plan prints the steps that mig apply makes on such a node, in order
// for each GPU. The order of GPUs is not planned.
func TestMIGPlanIsWhatApplyDoes(t *testing.T) {
	planned := regexp.MustCompile(`(?m)^(GPU [0-9]+), |^  [0-9]+\. (.+)$`)
	made := regexp.MustCompile(`msg="MIG step made" .*gpu=(\S+) .*step="([^"]+)"`)
	// steps are the steps of each GPU that has some, one string a GPU.
	steps := func(pattern *regexp.Regexp, text string) []string {
		var gpu string
		of := map[string]string{}
		for _, match := range pattern.FindAllStringSubmatch(text, -1) {
			if gpu = cmp.Or(match[1], gpu); match[2] != "" {
				of[gpu] += match[2] + "\n"
			}
		}
		return slices.Sorted(maps.Values(of))
	}
	for node, layout := range map[string]string{
		"h100": "all-balanced", "h100+all-1g.10gb": "all-balanced", "a100-40+all-balanced": "all-1g.5gb", "a30x4+all-1g.6gb": "all-2g.12gb",
		"h100+all-3g.40gb": "all-1c.3g.40gb", "h100+all-2g.20gb": "all-disabled", "h100+all-balanced": "all-balanced",
	} {
		t.Run(node+" to "+layout, func(t *testing.T) {
			code, plan, complaint := program(t, "mig", "plan", "--node", "sim:"+node, "--name", layout)
			if code != 0 {
				t.Fatalf("mig plan: exit code %d: %s", code, complaint)
			}
			code, _, log := program(t, "mig", "apply", "--node", "sim:"+node, "--name", layout)
			if code != 0 {
				t.Fatalf("mig apply: exit code %d: %s", code, log)
			}
			want := steps(planned, plan)
			if diff := gocmp.Diff(want, steps(made, log)); diff != "" {
				t.Errorf("mig plan says and mig apply does (-plan +apply):\n%s", diff)
			}
			if changes := node != "h100+"+layout; changes != (len(want) > 0) {
				t.Errorf("%d steps", len(want))
			}
		})
	}
}
