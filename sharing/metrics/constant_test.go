package metrics

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestConstantShowsAnyName(t *testing.T) {
	description := desc("test", "A test.", "name")
	for _, test := range []struct{ name, label, want string }{
		{"plain", "a", `{name="a"}`},
		{"quotes and lines", "a\"\n\\", `{name="a\"\n\\"}`},
		{"not UTF-8", "a\xff\xfeb", "{name=\"a\uFFFDb\"}"},
		{"markup", "</script>", `{name="</script>"}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			text := expose(t, some{description, Constant(description, prometheus.GaugeValue, 1, test.label)})
			if !strings.Contains(text, "virgate_test"+test.want+" 1\n") {
				t.Errorf("want %s in\n%s", test.want, text)
			}
		})
	}
}

// TestOneBadSeriesLeavesTheOthers holds for a metric that cannot be shown, and
// for a collector that panics.
func TestOneBadSeriesLeavesTheOthers(t *testing.T) {
	good, bad := desc("good", "A test."), desc("bad", "A test.", "name")
	for name, collector := range map[string]prometheus.Collector{
		"too few labels": some{bad, Constant(bad, prometheus.GaugeValue, 1)},
		"panic":          broken{bad},
	} {
		t.Run(name, func(t *testing.T) {
			registry := prometheus.NewRegistry()
			registry.MustRegister(Limit(10, some{good, Constant(good, prometheus.GaugeValue, 1)}, collector))
			families, err := registry.Gather()
			if err == nil {
				t.Error("nobody hears of it")
			}
			if len(families) != 2 || families[1].GetName() != "virgate_good" {
				t.Errorf("families %v", families)
			}
		})
	}
}

// some has one metric.
type some struct {
	description *prometheus.Desc
	metric      prometheus.Metric
}

func (s some) Describe(ch chan<- *prometheus.Desc) { ch <- s.description }
func (s some) Collect(ch chan<- prometheus.Metric) { ch <- s.metric }

// broken panics when it is asked.
type broken struct{ description *prometheus.Desc }

func (b broken) Describe(ch chan<- *prometheus.Desc) { ch <- b.description }
func (b broken) Collect(chan<- prometheus.Metric)    { panic("broken") }
