package nvml_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// metered is a simulated node with a meter that has read it once.
func metered(t *testing.T, name string) (*simnode.Node, *nvml.Meter) {
	t.Helper()
	node, err := simnode.New(name)
	if err != nil {
		t.Fatal(err)
	}
	meter := nvml.NewMeter(nvml.WithDeadlines(node, nvml.Limits{}))
	if _, err := meter.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	return node, meter
}

func do(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// uses are the processes of the board at the place in a reading.
func uses(t *testing.T, boards []sharing.BoardUse, at int) []sharing.ProcessUse {
	t.Helper()
	if len(boards) <= at || len(boards[at].Units) != 1 {
		t.Fatalf("boards %+v", boards)
	}
	return boards[at].Units[0].Processes
}

func TestMeterReadsABoard(t *testing.T) {
	node, meter := metered(t, "t4")
	do(t,
		node.AddProcess(0, simnode.WholeGPU, 20, 3<<30), node.AddProcess(0, simnode.WholeGPU, 10, nvml.MemoryUnknown),
		node.Work(0, 20, 40), node.Temperature(0, 71), node.Throttle(0, nvml.HardwareThermalSlowdown|nvml.SoftwarePowerCap), node.Sample(0),
	)
	boards, err := meter.Read(t.Context())
	do(t, err)
	want := sharing.BoardUse{
		GPU: boards[0].GPU, Memory: sharing.KnownFigure(3 << 30), SM: sharing.KnownFigure(0.4), Celsius: sharing.KnownFigure(71),
		Throttled: []sharing.ThrottleReason{sharing.ThrottleThermal, sharing.ThrottlePower}, ThrottleKnown: true,
		Units: []sharing.UnitProcesses{{Unit: boards[0].GPU, Processes: []sharing.ProcessUse{
			{PID: 10, SM: sharing.KnownFigure(0)},
			{PID: 20, Memory: sharing.KnownFigure(3 << 30), SM: sharing.KnownFigure(0.4)},
		}}},
	}
	if diff := cmp.Diff([]sharing.BoardUse{want}, boards); diff != "" {
		t.Errorf("use (-want +got):\n%s", diff)
	}
}

func TestMeterAveragesTheSamplesOfItsWindow(t *testing.T) {
	node, meter := metered(t, "t4")
	do(t, node.AddProcess(0, simnode.WholeGPU, 10, 1), node.Work(0, 10, 80), node.Sample(0))
	if _, err := meter.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	// What was read is not counted again, and of the rest the mean counts.
	do(t, node.Work(0, 10, 20), node.Sample(0), node.Work(0, 10, 40), node.Sample(0))
	do(t, node.Work(0, 10, 30)) // One more may become due meanwhile.
	boards, err := meter.Read(t.Context())
	do(t, err)
	if got := uses(t, boards, 0)[0].SM; got != sharing.KnownFigure(0.3) {
		t.Errorf("SM %+v, want the mean of 20, 40 and perhaps 30 percent", got)
	}
}

func TestMeterKnowsNothingOfTheFirstWindow(t *testing.T) {
	node, err := simnode.New("t4")
	do(t, err, node.AddProcess(0, simnode.WholeGPU, 10, 1), node.Work(0, 10, 80), node.Sample(0))
	boards, err := nvml.NewMeter(node).Read(t.Context())
	do(t, err)
	if got := uses(t, boards, 0)[0].SM; got.Known {
		t.Errorf("SM %+v of samples that may be old", got)
	}
}

func TestMeterBelievesNoSampleOnlyOfAnIdleBoard(t *testing.T) {
	node, meter := metered(t, "t4")
	do(t, node.AddProcess(0, simnode.WholeGPU, 10, 1))
	boards, err := meter.Read(t.Context())
	do(t, err)
	if got := uses(t, boards, 0)[0].SM; got != sharing.KnownFigure(0) {
		t.Errorf("SM %+v of an idle board's process, want 0", got)
	}
	do(t, node.Work(0, 10, 50))
	defer node.Script("DeviceGetProcessUtilization", simnode.Fault{Return: nvml.NotFound})()
	boards, err = meter.Read(t.Context())
	do(t, err)
	if got := uses(t, boards, 0)[0].SM; got.Known {
		t.Errorf("SM %+v of a busy board without samples, want unknown", got)
	}
}

func TestMeterReadsPartitions(t *testing.T) {
	node, meter := metered(t, "a30x4+all-balanced")
	do(t, node.AddProcess(1, 0, 10, 1<<30), node.AddProcess(1, 2, 11, 2<<30))
	boards, err := meter.Read(t.Context())
	do(t, err)
	gpus, err := nvml.Scan(node)
	do(t, err)
	for i, gpu := range gpus {
		var got sharing.BoardUse
		for _, board := range boards {
			if board.GPU == gpu.UUID {
				got = board
			}
		}
		if got.SM.Known || len(got.Units) != len(gpu.Partitions) {
			t.Fatalf("GPU %d: %+v, want %d partitions and no SM use", i, got, len(gpu.Partitions))
		}
		for _, unit := range got.Units {
			var want []sharing.ProcessUse
			switch {
			case i == 1 && unit.Unit == gpu.Partitions[0].UUID:
				want = []sharing.ProcessUse{{PID: 10, Memory: sharing.KnownFigure(1 << 30)}}
			case i == 1 && unit.Unit == gpu.Partitions[2].UUID:
				want = []sharing.ProcessUse{{PID: 11, Memory: sharing.KnownFigure(2 << 30)}}
			default:
				want = []sharing.ProcessUse{}
			}
			if diff := cmp.Diff(want, unit.Processes); diff != "" {
				t.Errorf("GPU %d, %s (-want +got):\n%s", i, unit.Unit, diff)
			}
		}
	}
}

func TestMeterFollowsTheNode(t *testing.T) {
	node, meter := metered(t, "l40sx8")
	counts := func(want int, failed bool) {
		t.Helper()
		boards, err := meter.Read(t.Context())
		if len(boards) != want || (err != nil) != failed {
			t.Fatalf("%d boards, %v; want %d", len(boards), err, want)
		}
	}
	do(t, node.Lose(3))
	counts(7, true)
	do(t, node.Heal(3))
	counts(8, false)
	do(t, node.Remove(0)) // All others move up: handles must be looked up anew.
	for range 9 {
		if boards, err := meter.Read(t.Context()); err == nil && len(boards) == 7 {
			break
		}
	}
	counts(7, false)
	if _, err := node.Add(""); err != nil {
		t.Fatal(err)
	}
	for range 9 {
		if boards, err := meter.Read(t.Context()); err == nil && len(boards) == 8 {
			break
		}
	}
	counts(8, false)
	// Nothing is left open.
	if err := node.Shutdown(); !errors.Is(err, nvml.Uninitialized) {
		t.Errorf("Shutdown after all readings: %v, want UNINITIALIZED", err)
	}
}

func TestMeterMissesWhatCannotBeRead(t *testing.T) {
	node, meter := metered(t, "l40sx8")
	_, err := node.ScriptGPU(2, "DeviceGetComputeRunningProcesses", simnode.Fault{Return: nvml.Unknown})
	do(t, err)
	boards, err := meter.Read(t.Context())
	if !errors.Is(err, nvml.Unknown) || len(boards) != 8 {
		t.Fatalf("%d boards, %v", len(boards), err)
	}
	missing := 0
	for _, board := range boards {
		if board.Units == nil {
			missing++
		}
	}
	if missing != 1 {
		t.Errorf("%d boards without processes, want 1", missing)
	}
}

func TestMeterEndsWithItsContext(t *testing.T) {
	node, meter := metered(t, "l40sx8")
	_, err := node.ScriptGPU(2, "DeviceGetMemoryInfo", simnode.Fault{Delay: 20 * time.Second})
	do(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	if _, err := meter.Read(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of the context", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
	// Another reading does without that board.
	boards, err := meter.Read(t.Context())
	if len(boards) != 7 || err == nil {
		t.Errorf("%d boards, %v; want 7 and what is wrong with the eighth", len(boards), err)
	}
}

// boastful is a driver whose boards are busier than they can be.
type boastful struct{ nvml.Library }

func (boastful) DeviceGetUtilizationRates(nvml.Device) (nvml.Utilization, error) {
	return nvml.Utilization{GPU: 1<<32 - 1}, nil
}

func TestMeterBelievesNoNonsense(t *testing.T) {
	node, err := simnode.New("t4")
	do(t, err)
	boards, err := nvml.NewMeter(boastful{node}).Read(t.Context())
	do(t, err)
	if got := boards[0].SM; got.Known || !boards[0].Memory.Known {
		t.Errorf("SM %+v, want unknown", got)
	}
}

// drawing is a driver whose processes that compute draw too.
type drawing struct{ nvml.Library }

func (d drawing) DeviceGetGraphicsRunningProcesses(device nvml.Device) ([]nvml.Process, error) {
	return d.DeviceGetComputeRunningProcesses(device)
}

func TestMeterCountsAProcessOnce(t *testing.T) {
	node, err := simnode.New("t4")
	do(t, err, node.AddProcess(0, simnode.WholeGPU, 20, 3<<30))
	boards, err := nvml.NewMeter(drawing{node}).Read(t.Context())
	do(t, err)
	if got := uses(t, boards, 0); len(got) != 1 || got[0].Memory != sharing.KnownFigure(3<<30) {
		t.Errorf("processes %+v, want one with 3 GiB", got)
	}
}
