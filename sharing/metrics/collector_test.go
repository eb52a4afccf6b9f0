package metrics

import (
	"flag"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

var update = flag.Bool("update", false, "write the golden exposition")

type fixed struct {
	gpus        []sharing.GPU
	resources   []sharing.Resource
	allocations []sharing.Allocation
	known       bool
}

func (f fixed) GPUs() []sharing.GPU                       { return f.gpus }
func (f fixed) Resources() []sharing.Resource             { return f.resources }
func (f fixed) Allocations() ([]sharing.Allocation, bool) { return f.allocations, f.known }

// shared is a node with one shared GPU and one with a partition, of which one
// is faulty.
func shared(t *testing.T) fixed {
	profile, err := mig.ParseProfile("1g.5gb")
	if err != nil {
		t.Fatal(err)
	}
	gpus := []sharing.GPU{
		{UUID: "GPU-a", Index: 0, PCIBusID: "00000000:07:00.0", Model: `Test "X"`, Memory: 1 << 30, Architecture: "ampere", NUMANode: 1},
		{UUID: "GPU-b", Index: 1, PCIBusID: "00000000:08:00.0", Model: "Test", Memory: 1 << 30, NUMANode: -1, MIG: true, Partitions: []sharing.Partition{
			{UUID: "MIG-b0", Profile: profile, Fault: "XID 94"},
		}},
	}
	plan := sharing.NewPlan(gpus, sharing.Profile{
		MIGStrategy: sharing.MIGMixed, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames: []sharing.Naming{{Pattern: "*", Name: "nvidia.com/gpu"}},
		Shares:   []sharing.Share{{Path: "s", Resource: "nvidia.com/gpu", Replicas: 2, Policy: sharing.Distributed}},
	})
	return fixed{gpus: gpus, resources: plan.Resources, known: true, allocations: []sharing.Allocation{
		{Namespace: "ns", Pod: "one", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::0"}},
		{Namespace: "ns", Pod: "two", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::1"}},
		{Namespace: "ns", Pod: "two", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a::1"}}, // Twice.
		{Namespace: "ns", Pod: "two", Container: "main", Resource: "example.com/nic", Devices: []string{"eth0"}},
	}}
}

// expose is what a scrape of the collector returns.
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

func TestExposition(t *testing.T) {
	for _, test := range []struct {
		name   string
		source fixed
	}{
		{"shared", shared(t)},
		{"nothing", fixed{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			collector := NewCollector(test.source)
			path := "testdata/" + test.name + ".prom"
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
		})
	}
}

func TestUnknownAllocationsMakeNoSeries(t *testing.T) {
	source := shared(t)
	source.known = false
	for _, name := range []string{"virgate_allocation_info", "virgate_unit_sharers"} {
		if n := testutil.CollectAndCount(NewCollector(source), name); n != 0 {
			t.Errorf("%d series of %s", n, name)
		}
	}
}
