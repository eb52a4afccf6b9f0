package simkubelet

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWitness(t *testing.T) {
	var seen []string
	r := startRig(t, Options{Witness: func(e Event) {
		line := e.Kind.String()
		for _, part := range []string{e.Resource, e.Pod[max(0, len(e.Pod)-1):]} {
			if part != "" {
				line += " " + part
			}
		}
		for _, d := range e.Devices {
			line += fmt.Sprintf(" %s:%t", d.ID, d.Healthy)
		}
		if e.ByKubelet {
			line += " by the kubelet"
		}
		seen = append(seen, line)
	}})
	p := r.startPlugin(gpu, "a.sock", healthy("b", "a")...)
	r.add(oneContainer("pod", 1))
	if _, err := r.AddPod(r.ctx, oneContainer("greedy", 2)); err == nil {
		t.Error("two devices of one that is free")
	}
	r.remove("default", "pod")
	r.DropStream(gpu)
	p.awaitEnd()
	if err := r.Stop(r.ctx); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"started", "registering nvidia.com/gpu", "stream opened nvidia.com/gpu", "listed nvidia.com/gpu b:true a:true",
		"granted nvidia.com/gpu 1 a:true", "freed 2", "freed 1", "stream ended nvidia.com/gpu by the kubelet", "stopped",
	}
	if diff := cmp.Diff(strings.Join(want, "\n"), strings.Join(seen, "\n")); diff != "" {
		t.Error(diff)
	}
}
