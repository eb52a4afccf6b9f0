package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
	"github.com/virgate/virgate/test/shortdir"
)

// holders returns these allocations or an error, and counts calls.
type holders struct {
	held  []sharing.Allocation
	err   error
	asked int
}

func (h *holders) Held(context.Context) ([]sharing.Allocation, error) {
	h.asked++
	return h.held, h.err
}
func (h *holders) Applied(context.Context) (map[string][]string, error) { return nil, h.err }
func (h *holders) Serving(context.Context, string) (bool, error)        { return false, h.err }

// watch is an agent on a simulated node. It runs nothing by itself; sampleNow samples.
type watch struct {
	*agent
	t       testing.TB
	node    *simnode.Node
	gpus    []sharing.GPU
	holders *holders
	pids    int
}

func newWatch(t testing.TB, name string, replicas int) *watch {
	t.Helper()
	node, err := simnode.New(name)
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := nvml.Scan(node)
	if err != nil {
		t.Fatal(err)
	}
	quiet := slog.New(slog.DiscardHandler)
	w := &watch{t: t, node: node, gpus: gpus, holders: &holders{}, pids: 100}
	dir := shortdir.New(t)
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: quiet})
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = manager.Run(ctx) })
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	w.agent = newAgent(withIdle(Options{
		Plugin: manager, Kubelet: w.holders, Settings: Settings{Logger: quiet, SampleInterval: time.Second},
		Measure: usage.NewSampler(usage.Options{Meter: nvml.NewMeter(node), Proc: node.Proc(), Containers: node, Logger: quiet}).Measure,
	}))
	w.state.Store(&state{gpus: gpus, plan: sharing.NewPlan(gpus, profile(replicas)), planned: true})
	changed := manager.Subscribe()
	for manager.Apply(w.state.Load().plan); !manager.Status().Served; {
		<-changed
	}
	w.sampleNow() // Of the first window nothing is known.
	return w
}

func (w *watch) sampleNow() {
	for index := range w.gpus {
		if err := w.node.TakeSample(index); err != nil {
			w.t.Fatal(err)
		}
	}
	w.samples.take(w.t.Context())
}

// pod gives the GPU's next free device to a new pod with a process, and returns its PID.
func (w *watch) pod(name string, gpu int, bytes uint64, percent int) (pid int) {
	w.t.Helper()
	w.pids++
	replica := 0
	for _, a := range w.holders.held {
		if strings.HasPrefix(a.Devices[0], w.gpus[gpu].UUID) {
			replica++
		}
	}
	w.holders.held = append(w.holders.held, sharing.Allocation{
		Namespace: "ns", Pod: name, Container: "main", Resource: gpuResource, Devices: []string{sharing.NewDeviceID(w.gpus[gpu].UUID, replica)},
	})
	w.process(gpu, bytes, percent, "ns/"+name+"/main")
	return w.pids
}

// process starts a process with the next ID.
func (w *watch) process(gpu int, bytes uint64, percent int, container string) {
	w.t.Helper()
	w.pids++
	err := w.node.Do("process-add", map[string]string{
		"gpu": strconv.Itoa(gpu), "pid": strconv.Itoa(w.pids), "bytes": strconv.FormatUint(bytes, 10), "sm": strconv.Itoa(percent), "container": container,
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// series are the values of a family by a label, for the series with all the other given labels.
func (w *watch) series(name, label string, with ...string) map[string]float64 {
	w.t.Helper()
	families, err := w.view.registry().Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	values := map[string]float64{}
	for _, family := range families {
		if family.GetName() != "virgate_"+name {
			continue
		}
		for _, metric := range family.Metric {
			labels := map[string]string{}
			for _, pair := range metric.Label {
				labels[pair.GetName()] = pair.GetValue()
			}
			matches := true
			for i := 0; i < len(with); i += 2 {
				matches = matches && labels[with[i]] == with[i+1]
			}
			if matches {
				values[labels[label]] += metric.GetGauge().GetValue() + metric.GetCounter().GetValue()
			}
		}
	}
	return values
}

func (w *watch) want(values map[string]float64, want string) {
	w.t.Helper()
	if got := fmt.Sprint(values); got != "map["+want+"]" {
		w.t.Errorf("got %s, want %s", got, want)
	}
}

const mebibyte = 1 << 20

func TestSharersHaveTheirOwnFigures(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "t4", 4)
	w.pod("one", 0, 100*mebibyte, 20)
	w.pod("two", 0, 5000*mebibyte, 75)
	w.sampleNow()
	w.want(w.series("container_memory_used_bytes", "pod"), "one:1.048576e+08 two:5.24288e+09")
	w.want(w.series("container_sm_utilization_ratio", "pod"), "one:0.2 two:0.75")
	w.want(w.series("container_processes", "pod"), "one:1 two:1")
	// A fair share of 15360 MiB by 4 is 3840 MiB.
	w.want(w.series("container_memory_over_share_bytes", "pod"), fmt.Sprintf("one:0 two:%v", float64(1160*mebibyte)))
	w.want(w.series("unit_active_sharers", ""), ":2")
	w.want(w.series("gpu_sm_utilization_ratio", ""), ":0.95")
	w.want(w.series("attribution_up", ""), ":1")
	if contended := w.series("gpu_contended_seconds_total", "")[""]; contended <= 0 {
		t.Errorf("contended for %v s with two that compute on a busy GPU", contended)
	}
}

func TestOneAloneIsNotContended(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "t4", 4)
	w.pod("one", 0, mebibyte, 100)
	w.pod("two", 0, mebibyte, 0)
	w.sampleNow()
	w.want(w.series("gpu_contended_seconds_total", ""), ":0")
	w.want(w.series("gpu_sm_max_share_ratio", ""), ":1")
}

// TestSumsAreTheDrivers checks that nothing is counted twice and nothing is lost.
func TestSumsAreTheDrivers(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "l40sx8", 4)
	for gpu := range 8 {
		w.pod(fmt.Sprintf("a%d", gpu), gpu, uint64(gpu+1)*mebibyte, gpu)
		w.pod(fmt.Sprintf("b%d", gpu), gpu, 7*mebibyte, 2*gpu)
		w.process(gpu, 11*mebibyte, 3, "")                              // On the host.
		w.process(gpu, 13*mebibyte, 5, "ns/intruder/main")              // Without a device.
		w.process(gpu, 17*mebibyte, 1, fmt.Sprintf("ns/a%d/main", gpu)) // A second one.
	}
	w.sampleNow()
	for _, pair := range [][3]string{
		{"gpu_memory_used_bytes", "container_memory_used_bytes", "unattributed_memory_bytes"},
		{"gpu_sm_utilization_ratio", "container_sm_utilization_ratio", "unattributed_sm_utilization_ratio"},
	} {
		totals := w.series(pair[0], "gpu_uuid")
		held, rest := w.series(pair[1], "gpu_uuid"), w.series(pair[2], "gpu_uuid")
		if len(totals) != 8 {
			t.Fatalf("%d totals of %s", len(totals), pair[0])
		}
		for gpu, total := range totals {
			if sum := held[gpu] + rest[gpu]; sum < total-1e-9 || sum > total+1e-9 {
				t.Errorf("%s of %s: %v and %v, want %v together", pair[0], gpu, held[gpu], rest[gpu], total)
			}
		}
	}
	w.want(w.series("unattributed_processes", "cause"), "no_container:8 not_allocated:8")
}

func TestAPodThatEndsVanishes(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "t4", 4)
	w.pod("one", 0, mebibyte, 20)
	w.pod("two", 0, mebibyte, 20)
	w.sampleNow()
	if err := w.node.RemoveProcess(0, simnode.WholeGPU, w.pids); err != nil {
		t.Fatal(err)
	}
	w.sampleNow()
	w.want(w.series("container_processes", "pod"), "one:1 two:0")
	w.want(w.series("container_memory_used_bytes", "pod"), "one:1.048576e+06 two:0")
	w.holders.held = w.holders.held[:1]
	w.sampleNow()
	for _, family := range []string{"container_memory_used_bytes", "container_processes", "allocation_info"} {
		if left := w.series(family, "pod"); len(left) != 1 || left["one"] == 0 {
			t.Errorf("%s of %v, want pod one alone", family, left)
		}
	}
}

func TestAContainerRestarts(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "t4", 4)
	w.pod("one", 0, mebibyte, 20)
	w.sampleNow()
	if err := w.node.RemoveProcess(0, simnode.WholeGPU, w.pids); err != nil {
		t.Fatal(err)
	}
	w.process(0, 3*mebibyte, 40, "ns/one/main")
	w.sampleNow()
	w.want(w.series("container_memory_used_bytes", "pod"), "one:3.145728e+06")
	w.want(w.series("container_sm_utilization_ratio", "pod"), "one:0.4")
}

func TestHoldersThatCannotBeRead(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "t4", 4)
	w.pod("one", 0, mebibyte, 20)
	w.sampleNow()
	w.holders.err = errors.New("no socket")
	w.sampleNow()
	for _, family := range []string{
		"container_memory_used_bytes", "container_sm_utilization_ratio", "container_processes", "allocation_info", "unit_sharers",
		"unit_active_sharers", "unattributed_memory_bytes", "unattributed_processes",
	} {
		w.want(w.series(family, "pod"), "")
	}
	w.want(w.series("gpu_memory_used_bytes", ""), ":1.048576e+06")
	w.want(w.series("attribution_up", ""), ":0")
	w.want(w.series("sample_errors_total", "source"), "driver:0 kubelet:1")
	w.want(w.series("attribution_errors_total", "stage"), "cgroup:0 nvml:0 pods:1")
	w.holders.err = nil
	w.sampleNow()
	w.want(w.series("container_processes", "pod"), "one:1")
}

func TestPartitionsHaveMemoryAlone(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "a30x4+all-balanced", 1)
	unit := w.gpus[2].Partitions[0].UUID
	w.holders.held = []sharing.Allocation{{Namespace: "ns", Pod: "one", Container: "main", Resource: "nvidia.com/mig", Devices: []string{unit}}}
	err := w.node.Do("process-add", map[string]string{"gpu": "2", "mig": "0", "pid": "7", "bytes": "5", "container": "ns/one/main"})
	if err != nil {
		t.Fatal(err)
	}
	w.sampleNow()
	w.want(w.series("container_memory_used_bytes", "unit_uuid"), unit+":5")
	w.want(w.series("container_sm_utilization_ratio", "pod"), "")
	w.want(w.series("gpu_sm_utilization_ratio", ""), "")
	w.want(w.series("unattributed_sm_utilization_ratio", ""), "")
}

// TestAScrapeAsksNobody checks that a scrape calls neither the driver nor the kubelet.
func TestAScrapeAsksNobody(t *testing.T) {
	t.Parallel()
	w := newWatch(t, "l40sx8", 4)
	w.pod("one", 0, mebibyte, 20)
	w.sampleNow()
	asked := func() (calls int) {
		for _, call := range []string{
			"Init", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetUUID", "DeviceGetMemoryInfo", "DeviceGetTemperature",
			"DeviceGetComputeRunningProcesses", "DeviceGetProcessUtilization", "DeviceGetUtilizationRates", "DeviceGetMigMode",
			"DeviceGetPowerUsage", "DeviceGetTotalEnergyConsumption", "DeviceGetMemoryErrorCounter", "DeviceGetRemappedRows",
		} {
			calls += w.node.Calls(call)
		}
		return calls + w.holders.asked
	}
	before := asked()
	handler := w.web.Handler()
	for range 10 {
		r := &rig{t: t, http: handler}
		if code, body := r.get("/metrics"); code != 200 || !strings.Contains(body, `virgate_container_processes{container="main"`) {
			t.Fatalf("answer %d: %s", code, body)
		}
	}
	if after := asked(); after != before {
		t.Errorf("%d calls while it was scraped", after-before)
	}
}

// TestSeriesAreBounded checks the bound of docs/reference/metrics.md.
func TestSeriesAreBounded(t *testing.T) {
	t.Parallel()
	w := crowded(t, 48)
	const bound = 2500
	count := testutil.CollectAndCount(w.view.registry())
	if pods := len(w.series("container_processes", "pod")); pods != 8*48 || count > bound {
		t.Errorf("%d series of %d containers, want at most %d", count, pods, bound)
	}
	w.HTTP.NoContainers = true
	if got := testutil.CollectAndCount(w.view.registry()); got > count-4*8*48 {
		t.Errorf("%d series without those of containers, %d with them", got, count)
	}
	w.HTTP = web.HTTP{MaxSeries: 500}
	if dropped := w.series("dropped_series", "")[""]; dropped < float64(count-600) {
		t.Errorf("%v dropped of %d with a limit of 500", dropped, count)
	}
}

// crowded is a node of eight GPUs with so many replicas each, all held.
func crowded(t testing.TB, replicas int) *watch {
	t.Helper()
	w := newWatch(t, "l40sx8", replicas)
	for gpu := range 8 {
		for replica := range replicas {
			w.pod(fmt.Sprintf("pod-%d-%d", gpu, replica), gpu, mebibyte, 1)
		}
	}
	w.sampleNow()
	return w
}

func BenchmarkScrape(b *testing.B) {
	for _, replicas := range []int{10, 48, 1000} {
		b.Run(fmt.Sprintf("8x%d", replicas), func(b *testing.B) {
			w := crowded(b, replicas)
			w.HTTP.MaxSeries = 1 << 20
			handler := w.web.Handler()
			b.ReportAllocs()
			for b.Loop() {
				recorder := httptest.NewRecorder()
				handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
				if recorder.Code != http.StatusOK {
					b.Fatal(recorder.Code)
				}
			}
		})
	}
}

// TestALateSampleSaysLittle checks that contention is not assumed for the whole time without samples.
func TestALateSampleSaysLittle(t *testing.T) {
	t.Parallel()
	last := &utilizationSample{at: time.Unix(1000, 0)}
	for after, want := range map[time.Duration]time.Duration{time.Second: time.Second, time.Hour: 10 * time.Second} {
		next := &utilizationSample{at: last.at.Add(after), UtilizationState: metrics.UtilizationState{
			Contended: map[string]time.Duration{"GPU-a": time.Minute},
			Report:    sharing.UtilizationReport{Contention: []sharing.Contention{{GPU: "GPU-a", Contended: true}, {GPU: "GPU-b"}}},
		}}
		next.countContention(last, 5*time.Second)
		if got := next.Contended["GPU-a"] - time.Minute; got != want || next.Contended["GPU-b"] != 0 {
			t.Errorf("%s counted after %s, want %s", got, after, want)
		}
	}
}

// TestGuardReports checks the report, the metrics and the status for a pod that exceeds its memory limit.
func TestGuardReports(t *testing.T) {
	t.Parallel()
	g := newWatch(t, "t4", 4)
	p := profile(4)
	p.TimeSlicing[0].Guard = sharing.MemoryGuard{Bytes: 3072 * mebibyte}
	g.state.Store(&state{gpus: g.gpus, plan: sharing.NewPlan(g.gpus, p), planned: true})
	g.guard.Pods.UID = func(_, pod string) string { return pod }
	g.pod("bad", 0, 4000*mebibyte, 0)
	g.pod("good", 0, 3072*mebibyte, 0)
	g.sampleNow()
	list := g.guard.OverLimits()
	if len(list) != 1 {
		t.Fatalf("over their limits are %+v", list)
	}
	if want := fmt.Sprintf("container main of pod ns/bad uses 4000 MiB of %s and may use 3072 MiB, for longer than 0s", g.gpus[0].UUID); list[0].Text != want {
		t.Errorf("text %q, want %q", list[0].Text, want)
	}
	if report := g.reports.report(g.state.Load(), *g.progress.Load(), g.Plugin.Status()); !slices.Equal(report.OverLimit, list) {
		t.Errorf("the report has %+v", report.OverLimit)
	}
	g.want(g.series("memory_guard_evictions_total", "result"), "evicted:0 failed:0 refused:0")
	g.want(g.series("container_memory_limit_bytes", "pod"), "bad:3.221225472e+09 good:3.221225472e+09")
	for i := range g.gpus[:1] {
		for _, h := range g.view.status(t.Context()).GPUs[i].Units[0].Holders {
			if h.Use == nil || h.Use.Limit == nil || *h.Use.Limit != 3072*mebibyte {
				t.Errorf("%s: use %+v", h.Pod, h.Use)
			}
		}
	}
}
