package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// TestPlanSaysForWhomAChangeWaits renames two shared GPUs, one of them held, with and without a running program
// that knows the holders.
func TestPlanSaysForWhomAChangeWaits(t *testing.T) {
	renamed := func() []sharing.Change {
		return []sharing.Change{
			{Kind: sharing.Renamed, Switches: []sharing.Switch{{Unit: "GPU-a", Index: "0", IdleShares: true}, {Unit: "GPU-b", Index: "1", IdleShares: true}}},
			{Kind: sharing.Vanishes, Switches: []sharing.Switch{{Unit: "GPU-b", Index: "1", IdleShares: true}, {Unit: "GPU-c", Index: "2"}}},
			{Kind: sharing.Grows},
			{Kind: sharing.Shrinks},
		}
	}
	says := func(changes []sharing.Change) []string {
		var lines []string
		warnings := explainWaits(changes)
		for _, c := range changes {
			lines = append(lines, c.Takes)
		}
		return append(lines, warnings...)
	}
	const last = ": while a pod holds a share, no other pod gets the idle ones, under either profile"
	if diff := cmp.Diff([]string{
		"about 0.3 s where free; GPU 0, 1 when the holders end", "about 0.3 s where free; GPU 1, 2 when the holders end", "at once",
		"at once; shares in use beyond that stay until their pods end", "GPU 0, 1" + last,
	}, says(renamed())); diff != "" {
		t.Error(diff)
	}

	status := status.Status{HoldersKnown: true, GPUs: []status.GPU{{Units: []status.Unit{
		{ID: "GPU-a", Holders: []status.Holder{{}, {Namespace: "ns", Pod: "a"}, {Namespace: "ns", Pod: "b"}, {Namespace: "ns", Pod: "b"}}}, {ID: "GPU-b"},
	}}}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(status) }))
	defer server.Close()
	changes, address := renamed(), strings.TrimPrefix(server.URL, "http://")
	if err := nameHolders(t.Context(), address, changes); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{
		"about 0.3 s where free; GPU 0 (a pod that the kubelet does not name, ns/a, ns/b) when the holders end", "about 0.3 s", "at once",
		"at once; shares in use beyond that stay until their pods end", "GPU 0" + last,
	}, says(changes)); diff != "" {
		t.Error(diff)
	}
	status.HoldersKnown = false
	if err := nameHolders(t.Context(), address, changes); err == nil {
		t.Error("a program that does not know who holds what is believed")
	}
	if err := nameHolders(t.Context(), "nowhere", changes); err == nil {
		t.Error("no address")
	}
}

// TestPlanHasTheLayoutMade checks that plan shows a node that is not yet divided like one that is, and also what
// is offered until it is.
func TestPlanHasTheLayoutMade(t *testing.T) {
	const shares = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}, {name: nvidia.com/mig-1g.10gb, devices: 3, replicas: 4, rename: nvidia.com/small}]}}\n"
	type report struct {
		sharing.Summary
		Now *sharing.Summary
	}
	plan := func(node, strategy, layout string) (r report) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "profile.yaml")
		document := shares + "flags: {migStrategy: " + strategy + "}\n"
		if layout != "" {
			document += "mig: {manage: true, config: " + layout + "}\n"
		}
		if err := os.WriteFile(path, []byte(document), 0o600); err != nil {
			t.Fatal(err)
		}
		code, stdout, stderr := program(t, "plan", "--node", "sim:"+node, "--config", path, "-o", "json")
		if code != 0 {
			t.Fatalf("%s to %s: exit code %d: %s", node, layout, code, stderr)
		}
		if err := json.Unmarshal([]byte(stdout), &r); err != nil {
			t.Fatal(err)
		}
		// A GPU has another UUID on another node.
		forget := func(s *sharing.Summary) {
			for i := range s.Resources {
				for j := range s.Resources[i].GPUs {
					s.Resources[i].GPUs[j].UUID = ""
				}
			}
		}
		forget(&r.Summary)
		if r.Now != nil {
			forget(r.Now)
		}
		return r
	}
	for _, test := range []struct{ node, then, strategy, layout string }{
		{"dgx-h100", "dgx-h100+all-balanced", "mixed", "all-balanced"},
		{"h100x2", "h100x2+all-1g.10gb", "single", "all-1g.10gb"},
		{"h100x2+all-1g.10gb", "h100x2+all-balanced", "mixed", "all-balanced"},
		{"h100x2+all-balanced", "h100x2", "none", "all-disabled"},
		{"h100x2+all-1g.10gb", "h100x2+all-1g.10gb", "mixed", "all-1g.10gb"},
		{"h100", "h100+all-enabled", "mixed", "all-enabled"},
		{"l40s", "l40s", "mixed", "all-balanced"},
	} {
		t.Run(test.node+" to "+test.layout, func(t *testing.T) {
			got, want, now := plan(test.node, test.strategy, test.layout), plan(test.then, test.strategy, ""), plan(test.node, test.strategy, "")
			if diff := cmp.Diff(want.Resources, got.Resources); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
			if unchanged := test.node == test.then; unchanged != (got.Now == nil) {
				t.Fatalf("before: %v", got.Now)
			}
			if got.Now != nil {
				if diff := cmp.Diff(now.Resources, got.Now.Resources); diff != "" {
					t.Errorf("now (-want +got):\n%s", diff)
				}
			}
		})
	}
}

func migProfile(t *testing.T, text string) mig.Profile {
	t.Helper()
	profile, err := mig.ParseProfile(text)
	if err != nil {
		t.Fatal(err)
	}
	return profile
}

// TestPlanOfGPUsThatKeepTheirPartitions has GPUs whose layout is impossible, now or ever: they are planned
// unchanged, with a warning.
func TestPlanOfGPUsThatKeepTheirPartitions(t *testing.T) {
	node, err := openSimulated("h100x4+all-1g.10gb", "")
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := nvml.Scan(node)
	if err != nil {
		t.Fatal(err)
	}
	list, err := readPartitions(t.Context(), nvml.NewPartitioner(node, nil), gpus)
	if err != nil {
		t.Fatal(err)
	}
	first := gpus[1].Partitions[0]
	if err := markBusy(list, []string{"1:0", "2"}); err != nil {
		t.Fatal(err)
	}
	list[3].state.NeedsReboot = true
	wanted := sharing.MIGConfig{Manage: true, Name: "one", WhenBusy: sharing.WaitWhenBusy, Blocks: []sharing.LayoutBlock{
		{All: true, Layout: mig.Layout{}}, {Indexes: []int{1, 2}, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: migProfile(t, "7g.80gb"), Count: 1}}}},
	}}
	after, warnings := afterChange(list, wanted)
	var got []string
	for _, gpu := range after {
		got = append(got, fmt.Sprint(gpu.MIG, len(gpu.Partitions)))
	}
	if diff := cmp.Diff([]string{"false 0", "true 1", "true 7", "true 7"}, got); diff != "" {
		t.Errorf("MIG and partitions (-want +got):\n%s", diff)
	}
	if kept := after[1].Partitions; len(kept) == 1 && kept[0].UUID != first.UUID {
		t.Errorf("the partition in use is %s, was %s", kept[0].UUID, first.UUID)
	}
	const busy = " cannot have all of its layout while it is in use: virgate mig plan says more"
	if diff := cmp.Diff([]string{"GPU 1" + busy, "GPU 2" + busy, "GPU 3 stays as it is: the MIG mode for the next reset is set"}, warnings); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}

// TestCommandsEndWhileTheyRead has commands wait for a FIFO without a writer.
func TestCommandsEndWhileTheyRead(t *testing.T) {
	for _, test := range [][]string{
		{"check", "FIFO"},
		{"plan", "--node", "sim:t4", "--config", "FIFO"},
		{"plan", "--node", "sim:t4", "--from", "FIFO"},
		{"mig", "plan", "--node", "sim:a30", "--config", "FIFO"},
		{"run", "--node", "sim:t4", "--config", "FIFO", "--device-plugin-dir", "DIR", "--listen", "", "--control-socket", ""},
	} {
		t.Run(strings.Join(test[:2], " "), func(t *testing.T) {
			dir := t.TempDir()
			fifo := filepath.Join(dir, "fifo")
			if err := syscall.Mkfifo(fifo, 0o600); err != nil {
				t.Fatal(err)
			}
			for i, word := range test {
				test[i] = strings.NewReplacer("FIFO", fifo, "DIR", dir).Replace(word)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				var output buffer
				run(ctx, append([]string{"virgate"}, test...), func(string) (string, bool) { return "", false }, &output, &output)
			}()
			// Opening the FIFO to write waits for a reader, which is then the command; nothing is written.
			writer, err := os.OpenFile(fifo, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			cancel()
			<-ended
			_ = writer.Close()
		})
	}
}

// TestPlanNodeOfTheCluster reads the labels of a named Node, or explains why it cannot.
func TestPlanNodeOfTheCluster(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/nodes/n1" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"n1","labels":{"nvidia.com/device-plugin.config":"four"}}}`))
	}))
	defer server.Close()
	profiles := filepath.Join(t.TempDir(), "profiles.yaml")
	const text = `apiVersion: v1
kind: ConfigMap
metadata: {name: p, namespace: gpu}
data:
  two: "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}"
  four: "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"
`
	if err := os.WriteFile(profiles, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		node, kubeconfig string
		code             int
		want             string
	}{
		{"n1", kubeconfigOf(t, server.URL), 0, "four"},
		{"n2", kubeconfigOf(t, server.URL), 1, "virgate: read node n2: "},
		{"n1", "/none", 1, "virgate: --node-object n1: there is no such file, and the cluster is not known: find the API server: "},
	} {
		var out, errors strings.Builder
		code := run(t.Context(), []string{"virgate", "plan", "--node", "sim:t4", "--config", profiles, "--node-object", test.node, "--kubeconfig", test.kubeconfig},
			func(string) (string, bool) { return "", false }, &out, &errors)
		if said := out.String() + errors.String(); code != test.code || !strings.Contains(said, test.want) {
			t.Errorf("%s: exit code %d, %s", test.node, code, said)
		}
	}
}
