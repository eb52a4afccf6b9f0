package simkubelet

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestEvents(t *testing.T) {
	var seen []string
	r := startRig(t, Options{OnEvent: func(e Event) {
		line := string(e.Kind)
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
		"started", "register called nvidia.com/gpu", "stream opened nvidia.com/gpu", "list received nvidia.com/gpu b:true a:true",
		"allocated nvidia.com/gpu 1 a:true", "pod ended 2", "pod ended 1", "stream ended nvidia.com/gpu by the kubelet", "stopped",
	}
	if diff := cmp.Diff(strings.Join(want, "\n"), strings.Join(seen, "\n")); diff != "" {
		t.Error(diff)
	}
}

// ReportStatus updates the node's status now. It does nothing while the kubelet is
// down.
func (k *Kubelet) ReportStatus() {
	k.lock()
	defer k.unlock()
	if k.process != nil {
		k.updateStatus(k.process)
	}
}
