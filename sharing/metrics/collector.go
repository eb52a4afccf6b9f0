package metrics

import (
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing"
)

// State is what a node offers and which containers hold it, at one moment.
type State struct {
	// GPUs are the node's GPUs as last read.
	GPUs []sharing.GPU
	// Planned is what the profile offers. Listed is what the kubelet has now: it includes devices
	// that are about to be removed, and the units that can be used.
	Planned, Listed []sharing.Resource
	// Allocations are the containers and their devices. While AllocationsKnown is false, series
	// that depend on them are absent.
	Allocations      []sharing.Allocation
	AllocationsKnown bool
}

// families are the metrics of a collector, by name without "virgate_".
type families map[string]*prometheus.Desc

// parseFamilies reads a table.
func parseFamilies(table string) families {
	parsed := families{}
	for line := range strings.Lines(table) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), "{")
		labels, help, _ := strings.Cut(rest, "} ")
		separator := func(r rune) bool { return r == ',' || r == ' ' }
		parsed[name] = prometheus.NewDesc("virgate_"+name, help, strings.FieldsFunc(labels, separator), nil)
	}
	return parsed
}

// Describe implements prometheus.Collector.
func (f families) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range f {
		ch <- desc
	}
}

// Send sends a metric with one value: a counter if its name ends in "_total", else a gauge.
type Send func(name string, value float64, labels ...string)

// to returns a Send that passes metrics to a scrape.
func (f families) to(ch chan<- prometheus.Metric) Send {
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

// OfTable returns a collector of the metrics in a table, one per line: name{label, label} meaning.
// It calls collect at each scrape.
func OfTable(table string, collect func(Send)) prometheus.Collector {
	return collector{parseFamilies(table), collect}
}

type collector struct {
	families
	collect func(Send)
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) { c.collect(c.to(ch)) }

//go:embed units.txt
var unitFamilies string

// NewCollector returns a collector of the result of state. Its series name no pods. Like the
// functions of the other collectors, state is called at each scrape, from any goroutine, and
// returns at once.
func NewCollector(state func() State) prometheus.Collector {
	return OfTable(unitFamilies, func(send Send) {
		now := state()
		collectUnits(send, now)
		if now.AllocationsKnown {
			collectHeld(send, now)
		}
	})
}

func collectUnits(send Send, state State) {
	for _, g := range state.GPUs {
		send("gpu_info", 1, g.UUID, strconv.Itoa(g.Index), g.Model, g.Architecture, strconv.FormatBool(g.MIG),
			g.PCIBusID, strconv.Itoa(g.NUMANode))
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
			profile := ""
			gi := ""
			ci := ""
			if u.Partition() {
				profile = u.Profile.String()
				gi = strconv.Itoa(u.GI)
				ci = strconv.Itoa(u.CI)
			}
			send("unit_info", 1, u.GPU, u.ID, profile, gi, ci, r.Name)
		}
	}
}

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

// BoolToFloat returns 1 for true and 0 for false.
func BoolToFloat(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// constMetric returns a metric with one value. Prometheus accepts only UTF-8, so other bytes in a
// label, for example in a driver's name, become U+FFFD instead of failing the scrape. With the
// wrong number of labels the metric is invalid; the scrape reports this and goes on.
func constMetric(desc *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) prometheus.Metric {
	if slices.ContainsFunc(labels, func(label string) bool { return !utf8.ValidString(label) }) {
		labels = slices.Clone(labels)
		for i, label := range labels {
			labels[i] = strings.ToValidUTF8(label, "\uFFFD")
		}
	}
	metric, err := prometheus.NewConstMetric(desc, kind, value, labels...)
	if err != nil {
		return prometheus.NewInvalidMetric(desc, err)
	}
	return metric
}

// LimitedCollector limits the total number of series of other collectors. It drops and counts
// further series, so the most important collectors come first. A histogram counts as one series;
// there are few.
type LimitedCollector struct {
	most       int
	collectors []prometheus.Collector
	own        families
}

// NewLimitedCollector returns a collector that passes on at most this many series of the
// collectors.
func NewLimitedCollector(most int, collectors ...prometheus.Collector) LimitedCollector {
	return LimitedCollector{
		most:       most,
		collectors: collectors,
		own: parseFamilies(
			"dropped_series{} Series that this scrape lacks because there are more than --metrics-max-series."),
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

// pass passes on metrics up to the limit, and then the number of dropped metrics.
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
	l.own.to(ch)("dropped_series", float64(dropped))
}

//go:embed health.txt
var healthFamilies string

// NewHealthCollector returns a collector of the result of report.
func NewHealthCollector(report func() sharing.HealthReport) prometheus.Collector {
	return OfTable(healthFamilies, func(send Send) { collectHealth(send, report()) })
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
		if m.Degraded != sharing.NoEvents {
			send("health_monitor_up", BoolToFloat(m.Degraded == ""), m.GPU)
		}
		if m.RowRemapPending != nil {
			send("gpu_row_remap_pending", BoolToFloat(*m.RowRemapPending), m.GPU)
		}
	}
}

// UtilizationState is the result of the last sample of the GPUs' utilization.
type UtilizationState struct {
	Report sharing.UtilizationReport
	// Age is the age of the sample. Sampled is false before the first sample.
	Age     time.Duration
	Sampled bool
	// Contended is how long each GPU has been contended in total, by UUID.
	Contended map[string]time.Duration
	// AttributionErrors counts errors by stage, SampleErrors by source.
	AttributionErrors map[sharing.AttributionStage]uint64
	SampleErrors      map[string]uint64
}

//go:embed utilization.txt
var utilizationFamilies string

// NewUtilizationCollector returns a collector of the result of use. Its series name no pods.
func NewUtilizationCollector(use func() UtilizationState) prometheus.Collector {
	return OfTable(utilizationFamilies, func(send Send) { collectUtilization(send, use()) })
}

func collectUtilization(send Send, use UtilizationState) {
	for stage, errors := range use.AttributionErrors {
		send("attribution_errors_total", float64(errors), string(stage))
	}
	for source, errors := range use.SampleErrors {
		send("sample_errors_total", float64(errors), source)
	}
	for gpu, contended := range use.Contended {
		send("gpu_contended_seconds_total", contended.Seconds(), gpu)
	}
	if !use.Report.Unwatched {
		send("attribution_up", BoolToFloat(use.Report.Attributed))
	}
	if use.Sampled {
		send("sample_age_seconds", use.Age.Seconds())
	}
	collectGPUs(send, use.Report)
	collectAttributed(send, use.Report)
}

func collectGPUs(send Send, report sharing.UtilizationReport) {
	for _, gpu := range report.GPUs {
		figure(send, "gpu_sm_utilization_ratio", gpu.SM, gpu.GPU)
		figure(send, "gpu_memory_used_bytes", gpu.Memory, gpu.GPU)
		figure(send, "gpu_temperature_celsius", gpu.Celsius, gpu.GPU)
		figure(send, "gpu_power_watts", gpu.Watts, gpu.GPU)
		figure(send, "gpu_energy_joules_total", gpu.Joules, gpu.GPU)
		for _, errors := range gpu.MemoryErrors {
			name := "gpu_ecc_errors_total"
			if errors.Lifetime {
				name = "gpu_ecc_lifetime_errors_total"
			}
			send(name, errors.Count, gpu.GPU, errors.Kind, errors.Location)
		}
		if rows := gpu.Rows; rows != nil {
			send("gpu_remapped_rows_total", rows.Correctable, gpu.GPU, "correctable")
			send("gpu_remapped_rows_total", rows.Uncorrectable, gpu.GPU, "uncorrectable")
			send("gpu_row_remap_failed", BoolToFloat(rows.Failed), gpu.GPU)
		}
		if !gpu.ThrottleKnown {
			continue
		}
		for _, reason := range sharing.ClockReasons() {
			send("gpu_clocks_event_reason", BoolToFloat(slices.Contains(gpu.ClockReasons, reason)), gpu.GPU, reason)
		}
		for _, reason := range sharing.ThrottleReasons() {
			send("gpu_throttled", BoolToFloat(slices.Contains(gpu.Throttled, reason)), gpu.GPU, string(reason))
		}
	}
}

func collectAttributed(send Send, report sharing.UtilizationReport) {
	if !report.Attributed {
		return
	}
	active := map[string]int{}
	for _, container := range report.Containers {
		if container.Processes > 0 {
			active[container.Unit]++
		}
	}
	for _, gpu := range report.GPUs {
		for _, unit := range gpu.Units {
			send("unit_active_sharers", float64(active[unit.Unit]), gpu.GPU, unit.Unit)
		}
	}
	for _, contention := range report.Contention {
		send("gpu_sm_max_share_ratio", contention.MaxShare, contention.GPU)
	}
	for _, rest := range report.Unattributed {
		if rest.Processes == 0 {
			continue
		}
		figure(send, "unattributed_memory_bytes", rest.Memory, rest.GPU, string(rest.Cause))
		figure(send, "unattributed_sm_utilization_ratio", rest.SM, rest.GPU, string(rest.Cause))
		send("unattributed_processes", float64(rest.Processes), rest.GPU, string(rest.Cause))
	}
}

func figure(send Send, name string, figure *float64, labels ...string) {
	if figure != nil {
		send(name, *figure, labels...)
	}
}

//go:embed containers.txt
var containerFamilies string

// NewContainerCollector returns a collector of all series that name a pod. They are gauges of the
// current state, so an ended pod leaves no series behind.
func NewContainerCollector(state func() State, use func() UtilizationState) prometheus.Collector {
	return OfTable(containerFamilies, func(send Send) {
		if now := state(); now.AllocationsKnown {
			collectAllocations(send, now)
			collectMPSLimits(send, now)
		}
		collectContainers(send, use().Report.Containers)
	})
}

func collectContainers(send Send, containers []sharing.ContainerUtilization) {
	for _, use := range containers {
		labels := []string{use.Namespace, use.Pod, use.Name, use.GPU, use.Unit}
		figure(send, "container_memory_used_bytes", use.Memory, labels...)
		figure(send, "container_sm_utilization_ratio", use.SM, labels...)
		send("container_processes", float64(use.Processes), labels...)
		figure(send, "container_memory_over_share_bytes", use.OverShare, labels...)
		if figure(send, "container_memory_limit_bytes", use.Limit, labels...); use.Limit != nil {
			send("container_memory_over_limit", BoolToFloat(use.OverLimit), labels...)
		}
	}
}

// collectMPSLimits shows the limits that containers were granted for units shared by MPS. A
// container that holds such a unit under another name has another grant.
func collectMPSLimits(send Send, state State) {
	gpu := sharing.GPUByUnit(state.GPUs)
	for _, usage := range sharing.Usage(state.Listed, state.Allocations) {
		shares := usage.Unit.MPS.Shares
		for _, h := range usage.Holders {
			if shares == 0 || h.Resource != usage.Resource {
				continue
			}
			limit := sharing.NewMPSLimit(min(len(h.Devices), shares), shares, usage.Unit.Memory)
			labels := []string{h.Namespace, h.Pod, h.Container, gpu[usage.Unit.ID], usage.Unit.ID}
			send("container_mps_thread_ratio", float64(limit.ThreadPercentage)/100, labels...)
			if limit.PinnedMemory > 0 {
				send("container_mps_memory_limit_bytes", float64(limit.PinnedMemory), labels...)
			}
		}
	}
}

func collectAllocations(send Send, state State) {
	gpu := sharing.GPUByUnit(state.GPUs)
	for _, resource := range state.Listed {
		for _, unit := range resource.Units {
			gpu[unit.ID] = unit.GPU
		}
	}
	seen := map[[5]string]bool{} // A repeated series would fail the scrape.
	for _, a := range state.Allocations {
		for _, device := range a.Devices {
			unit, _, _ := sharing.ParseDeviceID(device)
			gpu, known := gpu[unit]
			key := [5]string{a.Namespace, a.Pod, a.Container, a.Resource, device}
			if !known || seen[key] { // Another plugin's device, or a unit that the node does not have.
				continue
			}
			seen[key] = true
			send("allocation_info", 1, a.Namespace, a.Pod, a.Container, a.Resource, gpu, unit, device)
		}
	}
}
