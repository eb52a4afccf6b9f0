package metrics

import (
	"bytes"
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

var update = flag.Bool("update", false, "write the golden exposition")

type fixed struct {
	state State
	use   UtilizationState
}

func (f fixed) Sharing() State        { return f.state }
func (f fixed) Use() UtilizationState { return f.use }

// all is every collector of this package over the source.
func (f fixed) all(most int) LimitedCollector {
	return NewLimitedCollector(most, NewUtilizationCollector(f.Use), NewCollector(f.Sharing), NewContainerCollector(f.Sharing, f.Use))
}

// shared is a node with a shared GPU and a GPU with a faulty partition.
func shared(t *testing.T) fixed {
	profile, err := mig.ParseProfile("1g.5gb")
	if err != nil {
		t.Fatal(err)
	}
	gpus := []sharing.GPU{
		{UUID: "GPU-a", Index: 0, PCIBusID: "00000000:07:00.0", Model: `Test "X"`, Memory: 1 << 30, Architecture: "ampere", NUMANode: 1},
		{UUID: "GPU-b", Index: 1, PCIBusID: "00000000:08:00.0", Model: "Test", Memory: 1 << 30, NUMANode: -1, MIG: true, Partitions: []sharing.Partition{
			{UUID: "MIG-b0", Profile: profile, Health: sharing.Faulty("XID 94")},
		}},
	}
	plan := sharing.NewPlan(gpus, sharing.Profile{
		MIGStrategy: sharing.MIGMixed, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames:    []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
		TimeSlicing: []sharing.ReplicatedResource{{Path: "s", Resource: "nvidia.com/gpu", Replicas: 2, Policy: sharing.Distributed}},
	})
	state := State{GPUs: gpus, Planned: plan.Resources, Listed: slices.Clone(plan.Resources), AllocationsKnown: true, Allocations: []sharing.Allocation{
		{Namespace: "ns", Pod: "one", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::0"}},
		{Namespace: "other", Pod: "two", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::1"}},
		{Namespace: "other", Pod: "two", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::1"}}, // Twice.
		{Namespace: "ns", Pod: "three", Container: "main", Resource: "nvidia.com/mig-1g.5gb", Devices: []string{"MIG-b0"}},
		{Namespace: "ns", Pod: "three", Container: "main", Resource: "nvidia.com/old", Devices: []string{"MIG-gone"}},
		{Namespace: "ns", Pod: "two", Container: "main", Resource: "example.com/nic", Devices: []string{"eth0"}},
	}}
	// A list can have devices that the plan has not.
	first := &state.Listed[0]
	first.Devices = append(slices.Clone(first.Devices), sharing.Device{ID: "GPU-a::7", Unit: "GPU-a"})
	return fixed{state: state, use: used(state)}
}

// used is a sample of that node: the two sharers of the first GPU compute, the partition has no process, and
// other processes use the GPU too.
func used(state State) UtilizationState {
	ratio := func(v float64) *float64 { return &v }
	bytes := ratio
	measured := sharing.Measurement{
		GPUs: []sharing.GPUUtilization{
			{GPU: "GPU-a", Memory: bytes(1 << 30), SM: ratio(0.95), Celsius: ratio(61), ThrottleKnown: true, Throttled: []sharing.ThrottleReason{sharing.ThrottlePower},
				ClockReasons: []string{"sw_power_cap", "sync_boost"}, Watts: ratio(312.5), Joules: ratio(1234.5), Rows: &sharing.RemappedRows{Correctable: 1, Uncorrectable: 2, Failed: true},
				MemoryErrors: []sharing.MemoryErrors{{Kind: "corrected", Location: "dram", Count: 3}, {Kind: "corrected", Location: "dram", Lifetime: true, Count: 30}, {Kind: "uncorrected", Location: "sram", Count: 1}}, Units: []sharing.UnitProcesses{
					{Unit: "GPU-a", Processes: []sharing.ProcessUtilization{
						{PID: 1, Memory: bytes(100 << 20), SM: ratio(0.2)}, {PID: 2, Memory: bytes(700 << 20), SM: ratio(0.6)},
						{PID: 3, Memory: bytes(50 << 20), SM: ratio(0.1)}, {PID: 4, Memory: bytes(20 << 20), SM: ratio(0.05)}, {PID: 5, SM: ratio(0)},
					}},
				}},
			{GPU: "GPU-b", Memory: bytes(1 << 20), Celsius: ratio(40), Units: []sharing.UnitProcesses{{Unit: "MIG-b0"}}},
		},
		Owners: map[int]sharing.ProcessOwner{
			1: {Container: sharing.Container{Namespace: "ns", Pod: "one", Name: "main"}}, 2: {Container: sharing.Container{Namespace: "other", Pod: "two", Name: "main"}},
			3: {Container: sharing.Container{Namespace: "ns", Pod: "three", Name: "main"}}, 4: {Cause: sharing.CauseNoContainer}, 5: {Cause: sharing.CauseUnreadable},
		},
	}
	return UtilizationState{
		Report:  sharing.NewUtilizationReport(measured, state.GPUs, state.Listed, state.Allocations, state.AllocationsKnown),
		Sampled: true, Age: 1500 * time.Millisecond, Contended: map[string]time.Duration{"GPU-a": 90 * time.Second},
		AttributionErrors: map[sharing.AttributionStage]uint64{sharing.StageDriver: 1, sharing.StageProcess: 2, sharing.StagePods: 0},
		SampleErrors:      map[string]uint64{"driver": 1, "kubelet": 0},
	}
}

// expose returns a scrape of the collector.
func expose(t *testing.T, collector prometheus.Collector) string {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(collector)
	recorder := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(recorder, httptest.NewRequest("GET", "/metrics", nil))
	if recorder.Code != 200 {
		t.Fatalf("scrape: %d %s", recorder.Code, recorder.Body)
	}
	return recorder.Body.String()
}

// checkExposition checks that a scrape of the collector matches the file in testdata, and that the linter of
// Prometheus finds nothing.
func checkExposition(t *testing.T, collector prometheus.Collector, name string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	got := expose(t, collector)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Error(diff)
	}
	problems, err := testutil.CollectAndLint(collector)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
}

func TestExposition(t *testing.T) {
	for _, test := range []struct {
		name   string
		source fixed
	}{
		{"shared", shared(t)},
		{"nothing", fixed{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			checkExposition(t, test.source.all(1000), test.name+".prom")
		})
	}
}

// TestUnwatchedIsNotDown checks that a source that is not watched is not reported as down.
func TestUnwatchedIsNotDown(t *testing.T) {
	source := shared(t)
	source.use.Report = sharing.NewUtilizationReport(sharing.Measurement{Unwatched: true}, source.state.GPUs, nil, nil, true)
	if n := testutil.CollectAndCount(source.all(1000), "virgate_attribution_up"); n != 0 {
		t.Errorf("%d series of virgate_attribution_up", n)
	}
}

// TestUnknownIsAbsent checks that unknown values are not shown as 0.
func TestUnknownIsAbsent(t *testing.T) {
	dependent := []string{
		"virgate_allocation_info", "virgate_unit_sharers", "virgate_unit_tenants", "virgate_unit_devices", "virgate_gpu_oversubscription_ratio",
		"virgate_container_memory_used_bytes", "virgate_container_sm_utilization_ratio", "virgate_container_processes", "virgate_container_memory_over_share_bytes",
		"virgate_unattributed_memory_bytes", "virgate_unattributed_sm_utilization_ratio", "virgate_unattributed_processes",
		"virgate_unit_active_sharers", "virgate_gpu_sm_max_share_ratio",
	}
	known := shared(t)
	unknown := known
	unknown.state.AllocationsKnown = false
	unknown.use = used(unknown.state)
	for _, name := range dependent {
		if n := testutil.CollectAndCount(known.all(1000), name); n == 0 {
			t.Errorf("no series of %s when all is known", name)
		}
		if n := testutil.CollectAndCount(unknown.all(1000), name); n != 0 {
			t.Errorf("%d series of %s", n, name)
		}
	}
	if n := testutil.CollectAndCount(unknown.all(1000), "virgate_gpu_memory_used_bytes"); n != 2 {
		t.Errorf("%d series of what the driver says, want 2", n)
	}
}

// TestUnitDevicesAddUp checks that the three states add up to the listed devices.
func TestUnitDevicesAddUp(t *testing.T) {
	node := shared(t)
	listed := map[string]int{}
	for _, listing := range node.state.Listed {
		listed[listing.Name] += len(listing.Devices)
	}
	counted := map[string]int{}
	for _, o := range sharing.CountDevices(node.state.GPUs, node.state.Listed, node.state.Allocations) {
		counted[o.Resource] += o.Free + o.Allocated + o.Unhealthy
	}
	if diff := cmp.Diff(listed, counted); diff != "" {
		t.Errorf("devices (-listed +counted):\n%s", diff)
	}
}

func TestLimitDropsTheLastAndSaysHowMany(t *testing.T) {
	node := shared(t)
	all := testutil.CollectAndCount(node.all(1000)) - 1
	const most = 30
	limited := node.all(most)
	if n := testutil.CollectAndCount(limited); n != most+1 {
		t.Errorf("%d series, want %d and the count of those dropped", n, most)
	}
	want := fmt.Sprintf("virgate_dropped_series %d\n", all-most)
	if text := expose(t, limited); !strings.Contains(text, want) || strings.Contains(text, "pod=") {
		t.Errorf("want %q and no pods in\n%s", want, text)
	}
	if text := expose(t, node.all(all)); !strings.Contains(text, "virgate_dropped_series 0\n") {
		t.Error("dropped although there is room")
	}
}

// TestSharersAreContainers checks that a container counts once, even if it holds the unit under two names.
func TestSharersAreContainers(t *testing.T) {
	node := shared(t)
	node.state.Allocations = append(slices.Clone(node.state.Allocations),
		sharing.Allocation{Namespace: "ns", Pod: "one", Container: "main", Resource: "nvidia.com/old", Devices: []string{"GPU-a::5"}})
	const want = `virgate_unit_sharers{gpu_uuid="GPU-a",resource="nvidia.com/gpu",unit_uuid="GPU-a"} 2`
	if text := expose(t, node.all(1000)); !strings.Contains(text, want+"\n") {
		t.Errorf("want %s in\n%s", want, text)
	}
}

// TestHoldersByClaim checks that a container with a GPU by a claim is shown, although no list has that GPU.
func TestHoldersByClaim(t *testing.T) {
	node := shared(t)
	node.state.Listed, node.state.Planned = nil, nil
	claimed := sharing.Allocation{Namespace: "ns", Pod: "four", Container: "main", Resource: "gpu.example.com", Devices: []string{"GPU-a"}, Claim: "c"}
	second := claimed
	second.Claim = "d" // Of the same container: the same series.
	node.state.Allocations = []sharing.Allocation{claimed, second}
	const want = `virgate_allocation_info{container="main",device="GPU-a",gpu_uuid="GPU-a",namespace="ns",pod="four",resource="gpu.example.com",unit_uuid="GPU-a"} 1`
	if text := expose(t, node.all(1000)); !strings.Contains(text, want+"\n") {
		t.Errorf("want %s in\n%s", want, text)
	}
}

// TestMPSLimits checks the limits of containers under MPS, and that others have none.
func TestMPSLimits(t *testing.T) {
	const byMPS, sliced, gib = "nvidia.com/gpu", "nvidia.com/other", 1 << 30
	state := State{
		AllocationsKnown: true,
		GPUs:             []sharing.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b"}, {UUID: "GPU-c"}},
		Listed: []sharing.Resource{
			{Name: byMPS, Units: []sharing.Unit{
				{ID: "GPU-a", GPU: "GPU-a", Replicas: 3, Memory: gib, MPS: sharing.MPS{Shares: 3, Several: true}}, {ID: "GPU-c", GPU: "GPU-c", Replicas: 2, MPS: sharing.MPS{Shares: 2}},
			}},
			{Name: sliced, Units: []sharing.Unit{{ID: "GPU-b", GPU: "GPU-b", Replicas: 2, Memory: gib}}},
		},
		Allocations: []sharing.Allocation{
			{Namespace: "ns", Pod: "one", Container: "main", Resource: byMPS, Devices: []string{"GPU-a::0"}},
			{Namespace: "ns", Pod: "two", Container: "main", Resource: byMPS, Devices: []string{"GPU-a::1", "GPU-a::2"}},
			{Namespace: "ns", Pod: "unknown", Container: "main", Resource: byMPS, Devices: []string{"GPU-c::0"}}, // Its GPU's memory is not known.
			{Namespace: "ns", Pod: "old", Container: "main", Resource: sliced, Devices: []string{"GPU-a::4"}},
			{Namespace: "ns", Pod: "sliced", Container: "main", Resource: sliced, Devices: []string{"GPU-b::0"}},
		},
	}
	var got []string
	for line := range strings.Lines(expose(t, fixed{state: state}.all(1000))) {
		if strings.HasPrefix(line, "virgate_container_mps_") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	series := func(name, pod, gpu, value string) string {
		return fmt.Sprintf(`virgate_container_mps_%[1]s{container="main",gpu_uuid=%[2]q,namespace="ns",pod=%[3]q,unit_uuid=%[2]q} %[4]s`, name, gpu, pod, value)
	}
	want := []string{
		series("memory_limit_bytes", "one", "GPU-a", "3.57564416e+08"), series("memory_limit_bytes", "two", "GPU-a", "7.15128832e+08"), // 341 and 682 MiB, rounded down.
		series("thread_ratio", "one", "GPU-a", "0.33"), series("thread_ratio", "two", "GPU-a", "0.66"), series("thread_ratio", "unknown", "GPU-c", "0.5"),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestConstantShowsAnyName(t *testing.T) {
	description := prometheus.NewDesc("virgate_test", "A test.", []string{"name"}, nil)
	for _, test := range []struct{ name, label, want string }{
		{"plain", "a", `{name="a"}`},
		{"quotes and lines", "a\"\n\\", `{name="a\"\n\\"}`},
		{"not UTF-8", "a\xff\xfeb", "{name=\"a\uFFFDb\"}"},
		{"markup", "</script>", `{name="</script>"}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			text := expose(t, some{description, constMetric(description, prometheus.GaugeValue, 1, test.label)})
			if !strings.Contains(text, "virgate_test"+test.want+" 1\n") {
				t.Errorf("want %s in\n%s", test.want, text)
			}
		})
	}
}

// TestOneBadSeriesLeavesTheOthers checks that the other series survive a metric that cannot be shown, and a
// collector that panics.
func TestOneBadSeriesLeavesTheOthers(t *testing.T) {
	parsed := parseFamilies("good{} A test.\nbad{name} A test.")
	good, bad := parsed["good"], parsed["bad"]
	for name, collector := range map[string]prometheus.Collector{
		"too few labels": some{bad, constMetric(bad, prometheus.GaugeValue, 1)},
		"no such metric": unlisted{parsed},
		"panic":          broken{bad},
	} {
		t.Run(name, func(t *testing.T) {
			registry := prometheus.NewRegistry()
			registry.MustRegister(NewLimitedCollector(10, some{good, constMetric(good, prometheus.GaugeValue, 1)}, collector))
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

// unlisted sends a metric that its table does not have.
type unlisted struct{ families }

func (u unlisted) Describe(ch chan<- *prometheus.Desc) { ch <- u.families["bad"] }
func (u unlisted) Collect(ch chan<- prometheus.Metric) { u.to(ch)("other", 1) }

// broken panics when it is called.
type broken struct{ description *prometheus.Desc }

func (b broken) Describe(ch chan<- *prometheus.Desc) { ch <- b.description }
func (b broken) Collect(chan<- prometheus.Metric)    { panic("broken") }

func fixedHealth(report sharing.HealthReport) func() sharing.HealthReport {
	return func() sharing.HealthReport { return report }
}

func TestHealthExposition(t *testing.T) {
	collector := NewHealthCollector(fixedHealth(sharing.HealthReport{
		Units: []sharing.UnitHealth{
			{Unit: "GPU-a", GPU: "GPU-a", Index: "0", State: sharing.Healthy},
			{Unit: "MIG-a", GPU: "GPU-a", Index: "0:0", State: sharing.Suspect, Reason: "XID 94"},
		},
		Monitors: []sharing.HealthMonitor{{GPU: "GPU-a", RowRemapPending: new(true)}, {GPU: "GPU-b", RowRemapPending: new(false), Degraded: "not registered for events: UNKNOWN"}, {GPU: "GPU-c", Degraded: sharing.NoEvents}},
		Transitions: []sharing.TransitionCount{
			{GPU: "GPU-a", From: sharing.Healthy, To: sharing.Suspect, Cause: sharing.CauseXID, Count: 2},
		},
		XIDs: []sharing.XIDCount{
			{GPU: "GPU-a", XID: "94", Action: sharing.SuspectError, Count: 3},
			{GPU: "GPU-a", XID: sharing.OtherXID, Action: sharing.SuspectError, Count: 1},
		},
	}))
	checkExposition(t, collector, "health.prom")
	if n := testutil.CollectAndCount(NewHealthCollector(fixedHealth(sharing.HealthReport{}))); n != 0 {
		t.Errorf("%d series of a node without GPUs", n)
	}
}

// FuzzLabels checks that no name of a GPU, a unit or a pod breaks a scrape: the output can be parsed again, and
// has as many series.
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
