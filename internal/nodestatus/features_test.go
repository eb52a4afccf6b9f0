package nodestatus

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/test/await"
)

// featured is a healthy node with these feature labels.
func featured(generation string, labels map[string]string) nodereport.Report {
	report := applied(generation)
	report.Features = labels
	return report
}

// TestFeatureLabelsOfNode goes through reports and other programs' changes of the Node.
func TestFeatureLabelsOfNode(t *testing.T) {
	const product, count, memory = "nvidia.com/gpu.product", "nvidia.com/gpu.count", "nvidia.com/gpu.memory"
	f := newFakeAPI(t)
	f.node.Labels[memory] = "1" // A label without a known owner is taken over.
	c, err := connect(f.config(), nodeName, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	m := &metadata{client: c, features: true, noProfile: true, log: slog.New(slog.NewTextHandler(&log, nil))}
	nfd := func(names string) func() {
		return func() { f.node.Annotations["other.nfd.node.kubernetes.io/feature-labels"] = names }
	}
	for _, step := range []struct {
		name   string
		before func()
		labels map[string]string
		want   map[string]string
		owned  string
		writes int
	}{
		{"not known yet", nil, nil, map[string]string{memory: "1"}, "", 0},
		{"known", nil, map[string]string{product: "A", memory: "2"}, map[string]string{product: "A", memory: "2"}, memory + "," + product, 1},
		{"the same", nil, map[string]string{product: "A", memory: "2"}, map[string]string{product: "A", memory: "2"}, memory + "," + product, 1},
		{"another, and one less", nil, map[string]string{product: "B"}, map[string]string{product: "B"}, product, 2},
		{"after a restart", func() { m = &metadata{client: c, features: true, noProfile: true, log: m.log} }, map[string]string{count: "8"}, map[string]string{count: "8"}, count, 3},
		{"somebody takes it away", func() { delete(f.node.Labels, count) }, map[string]string{count: "8"}, map[string]string{count: "8"}, count, 4},
		{"somebody takes a stale one away", func() { delete(f.node.Labels, count) }, map[string]string{}, map[string]string{}, "", 5},
		{"NFD has it", func() { nfd("cpu-model," + count)(); f.node.Labels[count] = "9" }, map[string]string{count: "8", product: "A"}, map[string]string{count: "9", product: "A"}, product, 6},
		{"NFD takes the other one too", nfd(count + "," + product), map[string]string{count: "8"}, map[string]string{count: "9", product: "A"}, "", 7},
		{"NFD has gone", func() { nfd("")(); delete(f.node.Labels, count); delete(f.node.Labels, product) }, map[string]string{count: "8"}, map[string]string{count: "8"}, count, 8},
	} {
		t.Run(step.name, func(t *testing.T) {
			if step.before != nil {
				step.before()
			}
			again, err := m.write(t.Context(), featured("g1", step.labels))
			if err != nil {
				t.Fatal(err)
			}
			if (again > 0) != (step.labels != nil) {
				t.Errorf("to be looked at again in %s", again)
			}
			want := map[string]string{"theirs": "label"}
			maps.Copy(want, step.want)
			if diff := cmp.Diff(want, f.node.Labels); diff != "" {
				t.Errorf("labels (-want +got):\n%s", diff)
			}
			if got := f.node.Annotations[FeaturesAnnotation]; got != step.owned {
				t.Errorf("annotation %q, want %q", got, step.owned)
			}
			if got := f.count("PATCH "); got != step.writes {
				t.Errorf("%d writes, want %d", got, step.writes)
			}
		})
	}
	if told := strings.Count(log.String(), "left to node feature discovery"); told != 1 {
		t.Errorf("told %d times that NFD has a label, want once:\n%s", told, log.String())
	}
}

// TestFeatureLabelsWithProfile checks that labels and profile are written together.
func TestFeatureLabelsWithProfile(t *testing.T) {
	f := newFakeAPI(t)
	options := Options{Config: f.config(), Node: nodeName, Annotations: true, Features: FeatureOutput{Kind: FeaturesToNode}}
	r := start(t, options, fast())
	for i, generation := range []string{"g1", "g2"} {
		r.Report(featured(generation, map[string]string{"nvidia.com/gpu.replicas": generation}))
		f.await(generation, func() bool { return f.node.Annotations[GenerationAnnotation] == generation })
		f.change(func() {
			if got := f.node.Labels["nvidia.com/gpu.replicas"]; got != generation || f.count("PATCH ") != i+1 {
				t.Errorf("the profile is %s and the label %q after %d writes, want one for each", generation, got, f.count("PATCH "))
			}
		})
	}
}

func TestFeatureFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "virgate")
	r := start(t, Options{Features: FeatureOutput{Kind: FeaturesToFile, File: path}}, fast())
	r.Report(featured("g1", nil)) // Before anything is known, an old file stays.
	r.Report(featured("g1", map[string]string{"b": "2", "a": "1"}))
	await.Until(t, "the file", func() error {
		if data, err := os.ReadFile(path); string(data) != "a=1\nb=2\n" {
			return fmt.Errorf("it has %q, %w", data, err)
		}
		return nil
	})
}

// TestWriteFeatureFile checks that readers see the old or the new file, and that NFD, which reads all files of the
// folder, never sees a third.
func TestWriteFeatureFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "gfd")
	one, two := map[string]string{"a": "1"}, map[string]string{"a": "2"}
	if err := WriteFeatureFile(path, one); err != nil {
		t.Fatal(err)
	}
	open, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()
	before, _ := open.Stat()
	if err := WriteFeatureFile(path, one); err != nil {
		t.Fatal(err)
	}
	if same, err := os.Stat(path); err != nil || !os.SameFile(before, same) {
		t.Error("what is there already was written again")
	}
	if err := WriteFeatureFile(path, two); err != nil {
		t.Fatal(err)
	}
	var old [16]byte
	n, _ := open.Read(old[:])
	if data, err := os.ReadFile(path); string(data) != "a=2\n" || err != nil || string(old[:n]) != "a=1\n" {
		t.Errorf("the file has %q, %v, and who had it open reads %q", data, err, old[:n])
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 {
		t.Errorf("mode %v, %v: NFD may be another user", info.Mode(), err)
	}
	if files, err := os.ReadDir(dir); len(files) != 1 || err != nil {
		t.Errorf("%v are left, %v", files, err)
	}
	if err := WriteFeatureFile(filepath.Join(dir, "none", "gfd"), one); err == nil || !strings.Contains(err.Error(), filepath.Join(dir, "none")) {
		t.Errorf("error %v, want the folder that is missing", err)
	}
}

func TestNodeFeature(t *testing.T) {
	f := newFakeAPI(t)
	object, err := NewNodeFeature(f.config(), nodeName, FeatureOutput{Namespace: "virgate", Name: "features", Pod: "virgate-1"})
	if err != nil {
		t.Fatal(err)
	}
	pod := func(uid, owners string) string {
		return `{"metadata": {"name": "virgate-1", "uid": "` + uid + `", "ownerReferences": [` + owners + `]}}`
	}
	const daemonSet = `{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "virgate", "uid": "ds", "controller": true, "blockOwnerDeletion": true}`
	const replicaSet = `{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "virgate-5c", "uid": "rs", "controller": true}`
	owners := func(podUID string) []any {
		return []any{
			map[string]any{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "virgate", "uid": "ds", "controller": true},
			map[string]any{"apiVersion": "v1", "kind": "Pod", "name": "virgate-1", "uid": podUID},
		}
	}
	for _, step := range []struct {
		name, pod, value string
		owners           []any
		writes           int
	}{
		{"made, without the right to read the pod", "", "1", nil, 1},
		{"the same", "", "1", nil, 1},
		{"the pod may be read", pod("p1", daemonSet), "1", owners("p1"), 2},
		{"the same with owners", pod("p1", daemonSet), "1", owners("p1"), 2},
		{"changed", pod("p1", daemonSet), "2", owners("p1"), 3},
		{"another pod of the DaemonSet", pod("p2", daemonSet), "2", owners("p2"), 4},
		{"without the right again", "", "3", owners("p2"), 5},
		{"a ReplicaSet's pod", pod("p3", replicaSet), "3", nil, 6},
		{"a bare pod", pod("p4", ""), "3", nil, 6},
	} {
		t.Run(step.name, func(t *testing.T) {
			f.pod = step.pod
			if err := object.Write(t.Context(), map[string]string{"nvidia.com/gpu.count": step.value}); err != nil {
				t.Fatal(err)
			}
			metadata := map[string]any{"name": "features", "namespace": "virgate", "labels": map[string]any{"nfd.node.kubernetes.io/node-name": nodeName}}
			if step.owners != nil {
				metadata["ownerReferences"] = step.owners
			}
			delete(f.features["metadata"].(map[string]any), "creationTimestamp")
			want := map[string]any{
				"apiVersion": "nfd.k8s-sigs.io/v1alpha1", "kind": "NodeFeature", "metadata": metadata,
				"spec": map[string]any{
					"labels":   map[string]any{"nvidia.com/gpu.count": step.value},
					"features": map[string]any{"flags": map[string]any{}, "attributes": map[string]any{}, "instances": map[string]any{}},
				},
			}
			got := maps.Clone(f.features)
			got["metadata"] = maps.Clone(got["metadata"].(map[string]any))
			delete(got["metadata"].(map[string]any), "resourceVersion")
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("object (-want +got):\n%s", diff)
			}
			if writes := f.count("POST ") + f.count("PUT "); writes != step.writes {
				t.Errorf("%d writes, want %d", writes, step.writes)
			}
		})
	}
}
