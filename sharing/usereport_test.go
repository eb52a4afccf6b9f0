package sharing

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// sharedBoard is a board of 800 bytes that four devices stand for.
func sharedBoard() ([]GPU, []Resource) {
	gpus := []GPU{{UUID: "GPU-a", Memory: 800}, {UUID: "GPU-b", MIG: true, Partitions: []Partition{{UUID: "MIG-b", Memory: 100}}}}
	return gpus, []Resource{{Name: "r", Units: []Unit{{ID: "GPU-a", GPU: "GPU-a", Replicas: 4}, {ID: "MIG-b", GPU: "GPU-b", Replicas: 1}}}}
}

func holder(pod string, devices ...string) Allocation {
	return Allocation{Namespace: "ns", Pod: pod, Container: "c", Resource: "r", Devices: devices}
}

func containerOf(pod string) Container { return Container{Namespace: "ns", Pod: pod, Name: "c"} }

func inPod(pod string) Owner { return Owner{Container: containerOf(pod)} }

// on is a board with those processes.
func on(processes ...ProcessUse) BoardUse {
	return BoardUse{GPU: "GPU-a", SM: KnownFigure(1), Units: []UnitProcesses{{Unit: "GPU-a", Processes: processes}}}
}

func uses(pid int, memory, sm float64) ProcessUse {
	return ProcessUse{PID: pid, Memory: KnownFigure(memory), SM: KnownFigure(sm)}
}

func TestUseReportContainers(t *testing.T) {
	known := KnownFigure
	use := func(pod string, processes int, memory, sm, over Figure) ContainerUse {
		return ContainerUse{Container: containerOf(pod), GPU: "GPU-a", Unit: "GPU-a", Processes: processes, Memory: memory, SM: sm, OverShare: over}
	}
	for _, test := range []struct {
		name   string
		board  BoardUse
		held   []Allocation
		owners map[int]Owner
		want   []ContainerUse
	}{
		{
			name: "two sharers, one with two processes and too much memory", board: on(uses(1, 100, 0.25), uses(2, 150, 0.5), uses(3, 90, 0.125)),
			held: []Allocation{holder("a", "GPU-a::0"), holder("b", "GPU-a::1")}, owners: map[int]Owner{1: inPod("a"), 2: inPod("a"), 3: inPod("b")},
			want: []ContainerUse{use("a", 2, known(250), known(0.75), known(50)), use("b", 1, known(90), known(0.125), known(0))},
		},
		{
			name: "two devices are two shares", board: on(uses(1, 500, 0.1)),
			held: []Allocation{holder("a", "GPU-a::0", "GPU-a::3")}, owners: map[int]Owner{1: inPod("a")},
			want: []ContainerUse{use("a", 1, known(500), known(0.1), known(100))},
		},
		{
			name: "a holder without a process uses nothing", board: on(),
			held: []Allocation{holder("a", "GPU-a::0")}, owners: map[int]Owner{},
			want: []ContainerUse{use("a", 0, known(0), known(0), known(0))},
		},
		{
			name: "one unknown figure makes the sum unknown", board: on(uses(1, 500, 0.1), ProcessUse{PID: 2}),
			held: []Allocation{holder("a", "GPU-a::0")}, owners: map[int]Owner{1: inPod("a"), 2: inPod("a")},
			want: []ContainerUse{use("a", 2, Figure{}, Figure{}, Figure{})},
		},
		{
			name: "a unit whose processes are not known", board: BoardUse{GPU: "GPU-a"},
			held: []Allocation{holder("a", "GPU-a::0")}, owners: map[int]Owner{},
		},
		{
			name: "no name, no series", board: on(),
			held: []Allocation{{Container: "c", Resource: "r", Devices: []string{"GPU-a::0"}}}, owners: map[int]Owner{},
		},
		{
			name: "a partition has memory alone", board: BoardUse{GPU: "GPU-b", Units: []UnitProcesses{{Unit: "MIG-b", Processes: []ProcessUse{{PID: 1, Memory: known(70)}}}}},
			held: []Allocation{holder("a", "MIG-b")}, owners: map[int]Owner{1: inPod("a")},
			want: []ContainerUse{{Container: containerOf("a"), GPU: "GPU-b", Unit: "MIG-b", Processes: 1, Memory: known(70), OverShare: known(0)}},
		},
		{
			name: "a unit that is offered no more has no shares", board: BoardUse{GPU: "GPU-c", Units: []UnitProcesses{{Unit: "GPU-c"}}},
			held: []Allocation{holder("a", "GPU-c")}, owners: map[int]Owner{},
			want: []ContainerUse{{Container: containerOf("a"), GPU: "GPU-c", Unit: "GPU-c", Memory: known(0), SM: known(0)}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			gpus, resources := sharedBoard()
			report := NewUseReport(Measurement{Boards: []BoardUse{test.board}, Owners: test.owners}, gpus, resources, test.held, true)
			if diff := cmp.Diff(test.want, report.Containers); diff != "" {
				t.Errorf("containers (-want +got):\n%s", diff)
			}
		})
	}
}

func TestUseReportRest(t *testing.T) {
	gpus, resources := sharedBoard()
	measured := Measurement{
		Boards: []BoardUse{on(uses(1, 1, 0.1), uses(2, 2, 0.2), uses(3, 4, 0.3), uses(4, 8, 0.4), uses(5, 16, 0.5))},
		Owners: map[int]Owner{
			1: inPod("a"), 2: inPod("intruder"), 3: {Cause: CauseNoContainer}, 4: {Cause: CauseUnreadable}, // Nothing of 5.
		},
	}
	report := NewUseReport(measured, gpus, resources, []Allocation{holder("a", "GPU-a::0")}, true)
	want := []UnattributedUse{
		{GPU: "GPU-a", Cause: CauseNoContainer, Processes: 1, Memory: KnownFigure(4), SM: KnownFigure(0.3)},
		{GPU: "GPU-a", Cause: CauseNotAllocated, Processes: 1, Memory: KnownFigure(2), SM: KnownFigure(0.2)},
		{GPU: "GPU-a", Cause: CauseUnreadable, Processes: 2, Memory: KnownFigure(24), SM: KnownFigure(0.9)},
	}
	if diff := cmp.Diff(want, report.Unattributed); diff != "" {
		t.Errorf("the rest (-want +got):\n%s", diff)
	}
}

// TestUseReportUnknown holds that nothing is said of containers when either side
// is not known.
func TestUseReportUnknown(t *testing.T) {
	gpus, resources := sharedBoard()
	board := []BoardUse{on(uses(1, 1, 0.1))}
	held := []Allocation{holder("a", "GPU-a::0")}
	for name, report := range map[string]UseReport{
		"owners":  NewUseReport(Measurement{Boards: board}, gpus, resources, held, true),
		"holders": NewUseReport(Measurement{Boards: board, Owners: map[int]Owner{1: inPod("a")}}, gpus, resources, held, false),
	} {
		if diff := cmp.Diff(UseReport{Boards: board}, report); diff != "" {
			t.Errorf("%s unknown (-want +got):\n%s", name, diff)
		}
	}
}

func TestContention(t *testing.T) {
	for _, test := range []struct {
		name string
		busy Figure
		sm   []Figure
		want []Contention
	}{
		{"one hogs a full board", KnownFigure(1), []Figure{KnownFigure(0.75), KnownFigure(0.25)}, []Contention{{"GPU-a", 0.75, true}}},
		{"just full", KnownFigure(ContendedFrom), []Figure{KnownFigure(0.5), KnownFigure(0.5)}, []Contention{{"GPU-a", 0.5, true}}},
		{"room to spare", KnownFigure(0.89), []Figure{KnownFigure(0.5), KnownFigure(0.5)}, []Contention{{"GPU-a", 0.5, false}}},
		{"alone", KnownFigure(1), []Figure{KnownFigure(1)}, []Contention{{"GPU-a", 1, false}}},
		{"the other one is idle", KnownFigure(1), []Figure{KnownFigure(1), KnownFigure(0)}, []Contention{{"GPU-a", 1, false}}},
		{"all are idle", KnownFigure(1), []Figure{KnownFigure(0), KnownFigure(0)}, nil},
		{"one is unknown", KnownFigure(1), []Figure{KnownFigure(0.75), {}}, nil},
		{"the board does not tell", Figure{}, []Figure{KnownFigure(0.5), KnownFigure(0.5)}, []Contention{{"GPU-a", 0.5, false}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var containers []ContainerUse
			for _, sm := range test.sm {
				containers = append(containers, ContainerUse{GPU: "GPU-a", SM: sm})
			}
			if diff := cmp.Diff(test.want, contention([]BoardUse{{GPU: "GPU-a", SM: test.busy}}, containers)); diff != "" {
				t.Errorf("contention (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOccupancies(t *testing.T) {
	gpus, _ := sharedBoard()
	device := func(id, unit string, healthy bool) Device { return Device{ID: id, Unit: unit, Healthy: healthy} }
	listings := []Listing{
		{"r", []Device{
			device("GPU-a::0", "GPU-a", true), device("GPU-a::1", "GPU-a", false), device("GPU-a::2", "GPU-a", false),
			device("GPU-gone::0", "GPU-gone", false), device("GPU-a::3", "GPU-a", true),
		}},
		{"old", []Device{device("GPU-a::0", "GPU-a", false), device("MIG-b", "MIG-b", true)}},
	}
	held := []Allocation{holder("a", "GPU-a::1"), holder("b", "GPU-a::0"), {Resource: "other", Devices: []string{"MIG-b"}}}
	want := []Occupancy{
		{Resource: "r", GPU: "GPU-a", Unit: "GPU-a", Free: 1, Allocated: 2, Unhealthy: 1},
		{Resource: "r", Unit: "GPU-gone", Unhealthy: 1},
		{Resource: "old", GPU: "GPU-a", Unit: "GPU-a", Unhealthy: 1},
		{Resource: "old", GPU: "GPU-b", Unit: "MIG-b", Free: 1},
	}
	if diff := cmp.Diff(want, Occupancies(gpus, listings, held)); diff != "" {
		t.Errorf("occupancies (-want +got):\n%s", diff)
	}
}

func TestTenantsAndOversubscription(t *testing.T) {
	_, resources := sharedBoard()
	held := []Allocation{
		holder("a", "GPU-a::0"), holder("b", "GPU-a::1", "GPU-a::2"),
		{Namespace: "other", Pod: "a", Container: "c", Resource: "r", Devices: []string{"GPU-a::3"}},
		{Container: "c", Resource: "r", Devices: []string{"MIG-b"}},
		{Namespace: "ns", Pod: "z", Container: "c", Resource: "old", Devices: []string{"GPU-gone"}},
	}
	usages := Usage(resources, held)
	tenants := map[string]int{}
	for _, usage := range usages {
		tenants[usage.Unit.ID] = usage.Tenants()
	}
	held = append(held, Allocation{Namespace: "other", Pod: "a", Container: "c", Resource: "old", Devices: []string{"GPU-a::4"}})
	if got := Usage(resources, held)[0].Sharers(); got != 3 {
		t.Errorf("%d sharers of which one holds two names, want 3", got)
	}
	if diff := cmp.Diff(map[string]int{"GPU-a": 2, "MIG-b": 0, "GPU-gone": 1}, tenants); diff != "" {
		t.Errorf("tenants (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]Oversubscription{{"GPU-a", 4}, {"GPU-b", 1}}, Oversubscriptions(usages)); diff != "" {
		t.Errorf("oversubscription (-want +got):\n%s", diff)
	}
}

// TestUseReportOfAnUnreadBoard holds that nothing is said of the processes of a
// board whose processes could not be read.
func TestUseReportOfAnUnreadBoard(t *testing.T) {
	measured := Measurement{Boards: []BoardUse{{GPU: "GPU-a", Memory: KnownFigure(1)}}, Owners: map[int]Owner{}}
	report := NewUseReport(measured, nil, nil, []Allocation{holder("a", "GPU-a::0")}, true)
	if !report.Attributed || len(report.Containers)+len(report.Unattributed)+len(report.Contention) > 0 {
		t.Errorf("%+v", report)
	}
}

// TestFairShareIsNoMoreThanTheUnit is of a container that holds more devices of a
// unit than it is offered as by now.
func TestFairShareIsNoMoreThanTheUnit(t *testing.T) {
	s := shares{replicas: map[string]int{"u": 2}, memory: map[string]uint64{"u": 100}}
	if got := s.over("u", 3, KnownFigure(120)); got != KnownFigure(20) {
		t.Errorf("%+v over, want 20", got)
	}
}

// TestRestOfAPartitionedBoard holds that its compute is unknown, also of nobody.
func TestRestOfAPartitionedBoard(t *testing.T) {
	measured := Measurement{Boards: []BoardUse{{GPU: "GPU-b", Units: []UnitProcesses{{Unit: "MIG-b"}}}}, Owners: map[int]Owner{}}
	rest := NewUseReport(measured, nil, nil, nil, true).Unattributed
	if len(rest) != len(UnattributedCauses()) {
		t.Fatalf("%+v", rest)
	}
	for _, use := range rest {
		if use.SM.Known || use.Memory != KnownFigure(0) {
			t.Errorf("%+v, want no memory and unknown compute", use)
		}
	}
}
