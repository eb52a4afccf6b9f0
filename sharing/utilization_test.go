package sharing

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// sharedGPU is a GPU of 800 bytes that four devices stand for.
func sharedGPU() ([]GPU, []Resource) {
	gpus := []GPU{{UUID: "GPU-a", Memory: 800}, {UUID: "GPU-b", MIG: true, Partitions: []Partition{{UUID: "MIG-b", Memory: 100}}}}
	return gpus, []Resource{{Name: "r", Units: []Unit{{ID: "GPU-a", GPU: "GPU-a", Replicas: 4}, {ID: "MIG-b", GPU: "GPU-b", Replicas: 1}}}}
}

func holder(pod string, devices ...string) Allocation {
	return Allocation{Namespace: "ns", Pod: pod, Container: "c", Resource: "r", Devices: devices}
}

func containerOf(pod string) Container { return Container{Namespace: "ns", Pod: pod, Name: "c"} }

func inPod(pod string) ProcessOwner { return ProcessOwner{Container: containerOf(pod)} }

// on is a GPU with those processes.
func on(processes ...ProcessUtilization) GPUUtilization {
	return GPUUtilization{GPU: "GPU-a", SM: new(float64(1)), Units: []UnitProcesses{{Unit: "GPU-a", Processes: processes}}}
}

func uses(pid int, memory, sm float64) ProcessUtilization {
	return ProcessUtilization{PID: pid, Memory: new(float64(memory)), SM: new(float64(sm))}
}

func TestUseReportContainers(t *testing.T) {
	known := func(v float64) *float64 { return &v }
	use := func(pod string, processes int, memory, sm, over *float64) ContainerUtilization {
		return ContainerUtilization{Container: containerOf(pod), GPU: "GPU-a", Unit: "GPU-a", Processes: processes, Memory: memory, SM: sm, OverShare: over}
	}
	for _, test := range []struct {
		name   string
		gpu    GPUUtilization
		held   []Allocation
		owners map[int]ProcessOwner
		want   []ContainerUtilization
	}{
		{
			name: "two sharers, one with two processes and too much memory", gpu: on(uses(1, 100, 0.25), uses(2, 150, 0.5), uses(3, 90, 0.125)),
			held: []Allocation{holder("a", "GPU-a::0"), holder("b", "GPU-a::1")}, owners: map[int]ProcessOwner{1: inPod("a"), 2: inPod("a"), 3: inPod("b")},
			want: []ContainerUtilization{use("a", 2, known(250), known(0.75), known(50)), use("b", 1, known(90), known(0.125), known(0))},
		},
		{
			name: "two devices are two shares", gpu: on(uses(1, 500, 0.1)),
			held: []Allocation{holder("a", "GPU-a::0", "GPU-a::3")}, owners: map[int]ProcessOwner{1: inPod("a")},
			want: []ContainerUtilization{use("a", 1, known(500), known(0.1), known(100))},
		},
		{
			name: "a claim is of nobody knows how much", gpu: on(uses(1, 500, 0.1)),
			held:   []Allocation{{Namespace: "ns", Pod: "a", Container: "c", Resource: "gpu.nvidia.com", Devices: []string{"GPU-a"}, Claim: "claim"}},
			owners: map[int]ProcessOwner{1: inPod("a")},
			want:   []ContainerUtilization{use("a", 1, known(500), known(0.1), known(0))},
		},
		{
			name: "a holder without a process uses nothing", gpu: on(),
			held: []Allocation{holder("a", "GPU-a::0")}, owners: map[int]ProcessOwner{},
			want: []ContainerUtilization{use("a", 0, known(0), known(0), known(0))},
		},
		{
			name: "one unknown figure makes the sum unknown", gpu: on(uses(1, 500, 0.1), ProcessUtilization{PID: 2}),
			held: []Allocation{holder("a", "GPU-a::0")}, owners: map[int]ProcessOwner{1: inPod("a"), 2: inPod("a")},
			want: []ContainerUtilization{use("a", 2, nil, nil, nil)},
		},
		{
			name: "a unit whose processes are not known", gpu: GPUUtilization{GPU: "GPU-a"},
			held: []Allocation{holder("a", "GPU-a::0")}, owners: map[int]ProcessOwner{},
		},
		{
			name: "no name, no series", gpu: on(),
			held: []Allocation{{Container: "c", Resource: "r", Devices: []string{"GPU-a::0"}}}, owners: map[int]ProcessOwner{},
		},
		{
			name: "a partition has memory alone", gpu: GPUUtilization{GPU: "GPU-b", Units: []UnitProcesses{{Unit: "MIG-b", Processes: []ProcessUtilization{{PID: 1, Memory: known(70)}}}}},
			held: []Allocation{holder("a", "MIG-b")}, owners: map[int]ProcessOwner{1: inPod("a")},
			want: []ContainerUtilization{{Container: containerOf("a"), GPU: "GPU-b", Unit: "MIG-b", Processes: 1, Memory: known(70), OverShare: known(0)}},
		},
		{
			name: "a unit that is offered no more has no shares", gpu: GPUUtilization{GPU: "GPU-c", Units: []UnitProcesses{{Unit: "GPU-c"}}},
			held: []Allocation{holder("a", "GPU-c")}, owners: map[int]ProcessOwner{},
			want: []ContainerUtilization{{Container: containerOf("a"), GPU: "GPU-c", Unit: "GPU-c", Memory: known(0), SM: known(0)}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			gpus, resources := sharedGPU()
			report := NewUtilizationReport(Measurement{GPUs: []GPUUtilization{test.gpu}, Owners: test.owners}, gpus, resources, test.held, true)
			if diff := cmp.Diff(test.want, report.Containers); diff != "" {
				t.Errorf("containers (-want +got):\n%s", diff)
			}
		})
	}
}

func TestUseReportRest(t *testing.T) {
	gpus, resources := sharedGPU()
	measured := Measurement{
		GPUs: []GPUUtilization{on(uses(1, 1, 0.1), uses(2, 2, 0.2), uses(3, 4, 0.3), uses(4, 8, 0.4), uses(5, 16, 0.5), uses(6, 32, 0))},
		Owners: map[int]ProcessOwner{
			1: inPod("a"), 2: inPod("intruder"), 3: {Cause: CauseNoContainer}, 4: {Cause: CauseUnreadable}, 6: {Cause: CauseMPSServer}, // Nothing of 5.
		},
	}
	report := NewUtilizationReport(measured, gpus, resources, []Allocation{holder("a", "GPU-a::0")}, true)
	want := []UnattributedUtilization{
		{GPU: "GPU-a", Cause: CauseNoContainer, Processes: 1, Memory: new(float64(4)), SM: new(float64(0.3))},
		{GPU: "GPU-a", Cause: CauseNotAllocated, Processes: 1, Memory: new(float64(2)), SM: new(float64(0.2))},
		{GPU: "GPU-a", Cause: CauseMPSServer, Processes: 1, Memory: new(float64(32)), SM: new(float64(0))},
		{GPU: "GPU-a", Cause: CauseUnreadable, Processes: 2, Memory: new(float64(24)), SM: new(float64(0.9))},
	}
	if diff := cmp.Diff(want, report.Unattributed); diff != "" {
		t.Errorf("the rest (-want +got):\n%s", diff)
	}
}

// TestUseReportUnknown checks that nothing is reported of containers if either side is unknown.
func TestUseReportUnknown(t *testing.T) {
	gpus, resources := sharedGPU()
	gpu := []GPUUtilization{on(uses(1, 1, 0.1))}
	held := []Allocation{holder("a", "GPU-a::0")}
	for name, report := range map[string]UtilizationReport{
		"owners":  NewUtilizationReport(Measurement{GPUs: gpu}, gpus, resources, held, true),
		"holders": NewUtilizationReport(Measurement{GPUs: gpu, Owners: map[int]ProcessOwner{1: inPod("a")}}, gpus, resources, held, false),
	} {
		if diff := cmp.Diff(UtilizationReport{GPUs: gpu}, report); diff != "" {
			t.Errorf("%s unknown (-want +got):\n%s", name, diff)
		}
	}
}

// TestUseReportOfAnUnreadGPU checks that no processes are reported of a GPU whose processes could not be read.
func TestUseReportOfAnUnreadGPU(t *testing.T) {
	measured := Measurement{GPUs: []GPUUtilization{{GPU: "GPU-a", Memory: new(float64(1))}}, Owners: map[int]ProcessOwner{}}
	report := NewUtilizationReport(measured, nil, nil, []Allocation{holder("a", "GPU-a::0")}, true)
	if !report.Attributed || len(report.Containers)+len(report.Unattributed)+len(report.Contention) > 0 {
		t.Errorf("%+v", report)
	}
}

// TestRestOfAPartitionedGPU checks that unattributed compute of a partitioned GPU is unknown, even if nothing
// runs.
func TestRestOfAPartitionedGPU(t *testing.T) {
	measured := Measurement{GPUs: []GPUUtilization{{GPU: "GPU-b", Units: []UnitProcesses{{Unit: "MIG-b"}}}}, Owners: map[int]ProcessOwner{}}
	rest := NewUtilizationReport(measured, nil, nil, nil, true).Unattributed
	if len(rest) != len(UnattributedCauses()) {
		t.Fatalf("%+v", rest)
	}
	for _, use := range rest {
		if use.SM != nil || use.Memory == nil || *use.Memory != 0 {
			t.Errorf("%+v, want no memory and unknown compute", use)
		}
	}
}

// TestFairShareIsNoMoreThanTheUnit has a container that holds more devices of a unit than the unit now has.
func TestFairShareIsNoMoreThanTheUnit(t *testing.T) {
	s := fairShares{replicas: map[string]int{"u": 2}, memory: map[string]uint64{"u": 100}}
	if got := s.over("u", 3, new(float64(120))); got == nil || *got != 20 {
		t.Errorf("%+v over, want 20", got)
	}
}

func TestContention(t *testing.T) {
	for _, test := range []struct {
		name string
		busy *float64
		sm   []*float64
		want []Contention
	}{
		{"one hogs a full GPU", new(float64(1)), []*float64{new(float64(0.75)), new(float64(0.25))}, []Contention{{"GPU-a", 0.75, true}}},
		{"just full", new(float64(ContendedFrom)), []*float64{new(float64(0.5)), new(float64(0.5))}, []Contention{{"GPU-a", 0.5, true}}},
		{"room to spare", new(float64(0.89)), []*float64{new(float64(0.5)), new(float64(0.5))}, []Contention{{"GPU-a", 0.5, false}}},
		{"alone", new(float64(1)), []*float64{new(float64(1))}, []Contention{{"GPU-a", 1, false}}},
		{"the other one is idle", new(float64(1)), []*float64{new(float64(1)), new(float64(0))}, []Contention{{"GPU-a", 1, false}}},
		{"all are idle", new(float64(1)), []*float64{new(float64(0)), new(float64(0))}, nil},
		{"one is unknown", new(float64(1)), []*float64{new(float64(0.75)), nil}, nil},
		{"the GPU does not tell", nil, []*float64{new(float64(0.5)), new(float64(0.5))}, []Contention{{"GPU-a", 0.5, false}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var containers []ContainerUtilization
			for _, sm := range test.sm {
				containers = append(containers, ContainerUtilization{GPU: "GPU-a", SM: sm})
			}
			if diff := cmp.Diff(test.want, contention([]GPUUtilization{{GPU: "GPU-a", SM: test.busy}}, containers)); diff != "" {
				t.Errorf("contention (-want +got):\n%s", diff)
			}
		})
	}
}
