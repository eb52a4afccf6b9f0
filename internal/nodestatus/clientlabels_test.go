package nodestatus

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestClientLabels checks that only a label with the expected value is changed, and that a refusal is an error.
func TestClientLabels(t *testing.T) {
	const dcgm, exporter = "nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter"
	f := newFakeAPI(t)
	f.node.Labels = map[string]string{dcgm: "true", exporter: "false"}
	labels, err := NewClientLabels(f.config(), nodeName)
	if err != nil {
		t.Fatal(err)
	}
	both := []string{dcgm, exporter}
	expect := func(when string, dcgmValue, exporterValue string) {
		t.Helper()
		if diff := cmp.Diff(map[string]string{dcgm: dcgmValue, exporter: exporterValue}, f.node.Labels); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	for range 2 {
		if err := labels.Pause(t.Context(), both); err != nil {
			t.Error(err)
		}
		expect("paused", "paused-for-mig-change", "false")
	}
	// An admission policy refuses with the code of a failed comparison.
	for _, code := range []int{403, 422, 503} {
		f.refuse["/nodes/"+nodeName] = code
		if err := labels.Resume(t.Context(), both); err == nil || !strings.Contains(err.Error(), "label "+dcgm+": ") {
			t.Errorf("refused with %d: %v", code, err)
		}
	}
	clear(f.refuse)
	f.refuseWrites = true
	if err := labels.Resume(t.Context(), both); err == nil || strings.Contains(err.Error(), exporter) {
		t.Errorf("refused by a policy: %v", err)
	}
	f.refuseWrites = false
	f.node.Labels[dcgm] = "paused-for-mig-change_paused-for-driver-upgrade"
	if err := labels.Resume(t.Context(), both); err == nil || strings.Contains(err.Error(), exporter) {
		t.Errorf("while the driver is replaced: %v", err)
	}
	f.node.Labels[dcgm] = "paused-for-mig-change"
	f.node.Labels[exporter] = "paused-for-driver-upgrade"
	if err := labels.Resume(t.Context(), both); err != nil {
		t.Error(err)
	}
	expect("resumed", "true", "paused-for-driver-upgrade")
	delete(f.node.Labels, dcgm)
	if err := labels.Resume(t.Context(), both); err != nil || len(f.node.Labels) != 1 {
		t.Errorf("without the label: %v, %q", err, f.node.Labels)
	}
	f.node = nil
	if err := labels.Resume(t.Context(), both); err != nil {
		t.Errorf("without the Node: %v", err)
	}
}

// TestUninstallClientLabels checks that a GPU Operator label that Virgate has written stays, but not as paused.
func TestUninstallClientLabels(t *testing.T) {
	const dcgm, exporter, other = "nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter", "nvidia.com/gpu.deploy.gpu-feature-discovery"
	f := newFakeAPI(t)
	f.node.Labels = map[string]string{dcgm: "paused-for-mig-change", exporter: "true", other: "paused-for-mig-change"}
	f.node.ManagedFields = []metav1.ManagedFieldsEntry{
		{Manager: "virgate", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:` + dcgm + `":{},"f:` + exporter + `":{}}}}`)},
		{Manager: "mig-manager", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:` + other + `":{}}}}`)},
	}
	removed, err := Uninstall(t.Context(), f.config(), nodeName, "nvidia.com")
	if diff := cmp.Diff([]string{"pause of " + dcgm}, removed.Done); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if diff := cmp.Diff(map[string]string{dcgm: "true", exporter: "true", other: "paused-for-mig-change"}, f.node.Labels); diff != "" {
		t.Error(diff)
	}
}
