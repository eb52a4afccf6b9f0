package metrics

import (
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/virgate/virgate/sharing"
)

// State is what a node offers and who holds it, at one moment.
type State struct {
	// GPUs are the node's GPUs as last seen.
	GPUs []sharing.GPU
	// Planned is what the profile offers, Listed what the kubelet is told now: with the
	// devices that are about to be removed, and the units that can be used.
	Planned, Listed []sharing.Resource
	// Allocations say who holds what. While AllocationsKnown is false, series that
	// depend on them are absent.
	Allocations      []sharing.Allocation
	AllocationsKnown bool
}

// Families are the metrics that a collector has, by name without "virgate_".
type Families map[string]*prometheus.Desc

// ParseFamilies reads a table with a metric in each line: name{label, label} meaning.
func ParseFamilies(table string) Families {
	families := Families{}
	for line := range strings.Lines(table) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), "{")
		labels, help, _ := strings.Cut(rest, "} ")
		separator := func(r rune) bool { return r == ',' || r == ' ' }
		families[name] = prometheus.NewDesc("virgate_"+name, help, strings.FieldsFunc(labels, separator), nil)
	}
	return families
}

// Describe implements prometheus.Collector.
func (f Families) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range f {
		ch <- desc
	}
}

// Send sends a metric with one value: a counter if its name ends in "_total", else a gauge.
type Send func(name string, value float64, labels ...string)

// To sends metrics to a scrape.
func (f Families) To(ch chan<- prometheus.Metric) Send {
	return func(name string, value float64, labels ...string) {
		desc, known := f[name]
		if !known {
			desc = prometheus.NewInvalidDesc(fmt.Errorf("virgate_%s is in no table of metrics", name))
		}
		kind := prometheus.GaugeValue
		if strings.HasSuffix(name, "_total") {
			kind = prometheus.CounterValue
		}
		ch <- constMetric(desc, kind, value, labels...)
	}
}

// collector sends the metrics of its families at each scrape.
type collector struct {
	Families
	collect func(send Send)
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) { c.collect(c.To(ch)) }

//go:embed units.txt
var unitFamilies string

// NewCollector returns a collector of what state returns, whose series name no pods. Like the
// functions of the other collectors, state is called at each scrape, from any goroutine, and
// answers at once.
func NewCollector(state func() State) prometheus.Collector {
	return collector{ParseFamilies(unitFamilies), func(send Send) {
		now := state()
		collectUnits(send, now)
		if now.AllocationsKnown {
			collectHeld(send, now)
		}
	}}
}

// collectUnits shows what there is and how it is offered.
func collectUnits(send Send, state State) {
	for _, g := range state.GPUs {
		send("gpu_info", 1, g.UUID, strconv.Itoa(g.Index), g.Model, g.Architecture, strconv.FormatBool(g.MIG), g.PCIBusID, strconv.Itoa(g.NUMANode))
		send("gpu_memory_bytes", float64(g.Memory), g.UUID)
		send("unit_healthy", BoolToFloat(g.Health.Healthy()), g.UUID, g.UUID)
		for _, p := range g.Partitions {
			send("unit_healthy", BoolToFloat(g.Health.Healthy() && p.Health.Healthy()), g.UUID, p.UUID)
		}
	}
	for _, r := range state.Planned {
		send("resource_planned_devices", float64(len(r.Devices)), r.Name)
		send("resource_healthy_devices", float64(r.HealthyDevices()), r.Name)
	}
	for _, r := range state.Listed {
		for _, u := range r.Units {
			send("unit_replicas", float64(u.Replicas), r.Name, u.GPU, u.ID)
			profile, gi, ci := "", "", ""
			if u.Partition() {
				profile, gi, ci = u.Profile.String(), strconv.Itoa(u.GI), strconv.Itoa(u.CI)
			}
			send("unit_info", 1, u.GPU, u.ID, profile, gi, ci, r.Name)
		}
	}
}

// collectHeld shows how much of that is held.
func collectHeld(send Send, state State) {
	gpu := sharing.GPUByUnit(state.GPUs)
	for _, o := range sharing.CountDevices(state.GPUs, state.Listed, state.Allocations) {
		send("unit_devices", float64(o.Free), o.Resource, o.GPU, o.Unit, "free")
		send("unit_devices", float64(o.Allocated), o.Resource, o.GPU, o.Unit, "allocated")
		send("unit_devices", float64(o.Unhealthy), o.Resource, o.GPU, o.Unit, "unhealthy")
	}
	usages := sharing.Usage(state.Listed, state.Allocations)
	for _, usage := range usages {
		send("unit_sharers", float64(usage.Sharers()), usage.Resource, gpu[usage.Unit.ID], usage.Unit.ID)
		send("unit_tenants", float64(usage.Tenants()), gpu[usage.Unit.ID], usage.Unit.ID)
	}
	for gpu, ratio := range sharing.Oversubscriptions(usages) {
		send("gpu_oversubscription_ratio", ratio, gpu)
	}
}

// BoolToFloat is 1 for true and 0 for false.
func BoolToFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// constMetric returns a metric with one value. Prometheus accepts only UTF-8, so other bytes
// in a label, as in a driver's name, become U+FFFD and do not fail the scrape. With too few
// or too many labels the metric is invalid, which the scrape reports before it goes on.
func constMetric(desc *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) prometheus.Metric {
	labels = slices.Clone(labels)
	for i, label := range labels {
		labels[i] = strings.ToValidUTF8(label, "\uFFFD")
	}
	metric, err := prometheus.NewConstMetric(desc, kind, value, labels...)
	if err != nil {
		return prometheus.NewInvalidMetric(desc, err)
	}
	return metric
}

// LimitedCollector limits how many series other collectors show together. Those beyond are
// dropped and counted, so the collectors that matter most come first. A histogram counts as
// one series; there are few.
type LimitedCollector struct {
	most       int
	collectors []prometheus.Collector
	own        Families
}

// NewLimitedCollector returns a collector of at most so many series of the collectors.
func NewLimitedCollector(most int, collectors ...prometheus.Collector) LimitedCollector {
	return LimitedCollector{
		most: most, collectors: collectors,
		own: ParseFamilies("dropped_series{} Series that this scrape lacks because there are more than --metrics-max-series."),
	}
}

// Describe implements prometheus.Collector.
func (l LimitedCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range l.collectors {
		c.Describe(ch)
	}
	l.own.Describe(ch)
}

// Collect implements prometheus.Collector.
func (l LimitedCollector) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric, 64)
	var passing sync.WaitGroup
	passing.Go(func() { l.pass(all, ch) })
	defer passing.Wait()
	defer close(all)
	// Not in a goroutine of its own, so that a panic reaches the registry.
	for _, c := range l.collectors {
		c.Collect(all)
	}
}

// pass passes on metrics up to the limit, and then the number of those dropped.
func (l LimitedCollector) pass(all <-chan prometheus.Metric, ch chan<- prometheus.Metric) {
	shown, dropped := 0, 0
	for metric := range all {
		if shown == l.most {
			dropped++
			continue
		}
		shown++
		ch <- metric
	}
	l.own.To(ch)("dropped_series", float64(dropped))
}

//go:embed health.txt
var healthFamilies string

// NewHealthCollector returns a collector of what report returns.
func NewHealthCollector(report func() sharing.HealthReport) prometheus.Collector {
	return collector{ParseFamilies(healthFamilies), func(send Send) { collectHealth(send, report()) }}
}

func collectHealth(send Send, report sharing.HealthReport) {
	for _, u := range report.Units {
		for _, state := range sharing.HealthStates() {
			send("unit_health_state", BoolToFloat(u.State == state), u.GPU, u.Unit, string(state))
		}
	}
	for _, t := range report.Transitions {
		send("health_transitions_total", float64(t.Count), t.GPU, string(t.From), string(t.To), string(t.Cause))
	}
	for _, x := range report.XIDs {
		send("xid_events_total", float64(x.Count), x.GPU, x.XID, string(x.Action))
	}
	for _, m := range report.Monitors {
		send("health_monitor_up", BoolToFloat(m.Degraded == ""), m.GPU)
		send("gpu_row_remap_pending", BoolToFloat(m.RowRemapPending), m.GPU)
	}
}
