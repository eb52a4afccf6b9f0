package metrics

import (
	"bytes"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/virgate/virgate/sharing"
)

// FuzzLabels holds that no name of a board, a unit or a pod costs the scrape:
// what is written can be parsed again, and has as many series.
func FuzzLabels(f *testing.F) {
	for _, text := range []string{"", "plain", "\"\\\n} 1", "\xff", "\x00", "# TYPE x counter\nx 1", "\u202e", "é"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		source := shared(t)
		for i := range source.state.GPUs {
			source.state.GPUs[i].Model, source.state.GPUs[i].Architecture, source.state.GPUs[i].PCIBusID = text, text, text
		}
		for i := range source.state.Allocations {
			source.state.Allocations[i].Namespace = text
			source.state.Allocations[i].Container = text
		}
		source.state.Allocations[0].Devices = append(source.state.Allocations[0].Devices, text, sharing.NewDeviceID("GPU-a", 7)+text)
		registry := prometheus.NewPedanticRegistry()
		registry.MustRegister(source.all(1000))
		families, err := registry.Gather()
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		var page bytes.Buffer
		for _, family := range families {
			if _, err := expfmt.MetricFamilyToText(&page, family); err != nil {
				t.Fatalf("%q: %v", text, err)
			}
		}
		parser := expfmt.NewTextParser(model.UTF8Validation)
		read, err := parser.TextToMetricFamilies(bytes.NewReader(page.Bytes()))
		if err != nil {
			t.Fatalf("%q makes a page that nobody can read: %v\n%s", text, err, page.String())
		}
		for _, family := range families {
			if got := len(read[family.GetName()].GetMetric()); got != len(family.Metric) {
				t.Errorf("%q: %d series of %s, want %d", text, got, family.GetName(), len(family.Metric))
			}
		}
	})
}
