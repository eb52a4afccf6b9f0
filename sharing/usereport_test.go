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

// TestUseReportOfAnUnreadBoard holds that nothing is said of the processes of a
// board whose processes could not be read.
func TestUseReportOfAnUnreadBoard(t *testing.T) {
	measured := Measurement{Boards: []BoardUse{{GPU: "GPU-a", Memory: KnownFigure(1)}}, Owners: map[int]Owner{}}
	report := NewUseReport(measured, nil, nil, []Allocation{holder("a", "GPU-a::0")}, true)
	if !report.Attributed || len(report.Containers)+len(report.Unattributed)+len(report.Contention) > 0 {
		t.Errorf("%+v", report)
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
