package nvml_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/nvmltest"
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

// uses are the processes of the GPU at this place in a reading.
func uses(t *testing.T, gpus []sharing.GPUUtilization, at int) []sharing.ProcessUtilization {
	t.Helper()
	if len(gpus) <= at || len(gpus[at].Units) != 1 {
		t.Fatalf("GPUs %+v", gpus)
	}
	return gpus[at].Units[0].Processes
}

func TestMeterReadsAGPU(t *testing.T) {
	synctest.Test(t, testMeterReadsAGPU) // The energy that a GPU has used depends on the time.
}

func testMeterReadsAGPU(t *testing.T) {
	node, meter := metered(t, "a100-40")
	do(t, node.SetPower(0, 250), node.ECC(0, false), node.ECC(0, false), node.ECC(0, true), node.Repair(0), node.Heal(0))
	do(t, node.SetPower(0, 250))
	pass(time.Minute) // The next reading of memory errors is due.
	do(t,
		node.AddProcess(0, simnode.WholeGPU, 20, 3<<30), node.AddProcess(0, simnode.WholeGPU, 10, nvml.MemoryUnknown),
		node.SetUtilization(0, 20, 40), node.SetTemperature(0, 71), node.Throttle(0, nvml.HardwareThermalSlowdown|nvml.SoftwarePowerCap), node.TakeSample(0),
	)
	gpus, err := meter.Read(t.Context())
	do(t, err)
	want := sharing.GPUUtilization{
		GPU: gpus[0].GPU, Memory: new(float64(3 << 30)), SM: new(float64(0.4)), Celsius: new(float64(71)),
		Throttled: []sharing.ThrottleReason{sharing.ThrottleThermal, sharing.ThrottlePower}, ThrottleKnown: true,
		ClockReasons: []string{"sw_power_cap", "hw_thermal_slowdown"}, Watts: new(250.0), Joules: new(15000.0),
		MemoryErrors: []sharing.MemoryErrors{
			{Kind: "corrected", Location: "dram", Count: 2}, {Kind: "corrected", Location: "dram", Lifetime: true, Count: 2},
			{Kind: "uncorrected", Location: "dram", Count: 1}, {Kind: "uncorrected", Location: "dram", Lifetime: true, Count: 1},
			{Kind: "corrected", Location: "sram"}, {Kind: "corrected", Location: "sram", Lifetime: true},
			{Kind: "uncorrected", Location: "sram"}, {Kind: "uncorrected", Location: "sram", Lifetime: true},
		},
		Rows: &sharing.RemappedRows{Uncorrectable: 1},
		Units: []sharing.UnitProcesses{{Unit: gpus[0].GPU, Processes: []sharing.ProcessUtilization{
			{PID: 10, SM: new(float64(0))},
			{PID: 20, Memory: new(float64(3 << 30)), SM: new(float64(0.4))},
		}}},
	}
	if diff := cmp.Diff([]sharing.GPUUtilization{want}, gpus); diff != "" {
		t.Errorf("use (-want +got):\n%s", diff)
	}
}

// TestMeterLeavesOutWhatTheDriverDoesNotTell checks that an unavailable value is left out, without affecting
// others.
func TestMeterLeavesOutWhatTheDriverDoesNotTell(t *testing.T) {
	told := func(use sharing.GPUUtilization) map[string]bool {
		return map[string]bool{
			"DeviceGetPowerUsage": use.Watts != nil, "DeviceGetTotalEnergyConsumption": use.Joules != nil, "DeviceGetRemappedRows": use.Rows != nil,
			"DeviceGetMemoryErrorCounter": len(use.MemoryErrors) == 8, "DeviceGetCurrentClocksEventReasons": use.ThrottleKnown,
		}
	}
	test := func(t *testing.T, call string, code nvml.Return) {
		node, meter := metered(t, "a100-40")
		do(t, node.Init()) // So that handles stay valid between readings.
		read := func() []sharing.GPUUtilization {
			pass(time.Minute) // The next reading of memory errors is due.
			gpus, err := meter.Read(t.Context())
			do(t, err)
			return gpus
		}
		read()
		end := node.InjectFault(call, simnode.Fault{Return: code})
		gpus := read()
		for other, is := range told(gpus[0]) {
			if is == (other == call) {
				t.Errorf("%s is %s: %s is told: %t", call, code, other, is)
			}
		}
		end()
		gpus = read()
		// A value that the driver does not have is not asked for again.
		if is := told(gpus[0])[call]; is == (call == "DeviceGetMemoryErrorCounter" && (code == nvml.NotSupported || code == nvml.FunctionNotFound)) {
			t.Errorf("%s was %s and is not any more: it is told: %t", call, code, is)
		}
	}
	for _, code := range []nvml.Return{nvml.NotSupported, nvml.FunctionNotFound, nvml.NoPermission, nvml.Unknown} {
		for call := range told(sharing.GPUUtilization{}) {
			synctest.Test(t, func(t *testing.T) { test(t, call, code) })
		}
	}
}

// TestMeterAsksForMemoryErrorsThatThereAre checks that unsupported counters are read once, and again when MIG was
// turned on or off.
func TestMeterAsksForMemoryErrorsThatThereAre(t *testing.T) {
	synctest.Test(t, testMeterAsksForMemoryErrorsThatThereAre)
}

func testMeterAsksForMemoryErrorsThatThereAre(t *testing.T) {
	node, err := simnode.New("a100-40")
	do(t, err, node.Init(), node.ECC(0, true))
	old := false
	meter := nvml.NewMeter(nvml.Intercept(node, func(call nvml.Call, do func() (any, error)) (any, error) {
		if old {
			return nvml.Volta, nil
		}
		return do()
	}, "DeviceGetArchitecture"))
	read := func(calls, uncorrected int) {
		t.Helper()
		pass(time.Minute)
		before := node.Calls("DeviceGetMemoryErrorCounter")
		gpus, err := meter.Read(t.Context())
		do(t, err)
		if asked := node.Calls("DeviceGetMemoryErrorCounter") - before; asked != calls {
			t.Errorf("asked for %d counters, want %d", asked, calls)
		}
		for _, errors := range gpus[0].MemoryErrors {
			if errors.Kind == "uncorrected" && errors.Location == "dram" {
				uncorrected -= int(errors.Count)
			}
		}
		if uncorrected != 0 {
			t.Errorf("%+v: %d uncorrected errors too few", gpus[0].MemoryErrors, uncorrected)
		}
	}
	read(8, 2) // Since the driver was loaded, and ever.
	read(8, 2)
	do(t, nvmltest.SetMIG(node, 0, true))
	read(8, 1) // Ever.
	read(4, 1)
	old = true // Before Turing there are more.
	do(t, nvmltest.SetMIG(node, 0, false))
	read(8*4, 2)
	read(8, 2)
	do(t, node.ECC(0, true))
	read(8, 4)
}

func TestMeterAveragesTheSamplesOfItsWindow(t *testing.T) {
	node, meter := metered(t, "t4")
	do(t, node.AddProcess(0, simnode.WholeGPU, 10, 1), node.SetUtilization(0, 10, 80), node.TakeSample(0))
	if _, err := meter.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Samples already read do not count again, and the mean of the others counts.
	do(t, node.SetUtilization(0, 10, 20), node.TakeSample(0), node.SetUtilization(0, 10, 40), node.TakeSample(0))
	do(t, node.SetUtilization(0, 10, 30)) // One more may become due meanwhile.
	gpus, err := meter.Read(t.Context())
	do(t, err)
	if got := uses(t, gpus, 0)[0].SM; got == nil || *got != 0.3 {
		t.Errorf("SM %+v, want the mean of 20, 40 and perhaps 30 percent", got)
	}
}

func TestMeterKnowsNothingOfTheFirstWindow(t *testing.T) {
	node, err := simnode.New("t4")
	do(t, err, node.AddProcess(0, simnode.WholeGPU, 10, 1), node.SetUtilization(0, 10, 80), node.TakeSample(0))
	gpus, err := nvml.NewMeter(node).Read(t.Context())
	do(t, err)
	if got := uses(t, gpus, 0)[0].SM; got != nil {
		t.Errorf("SM %+v of samples that may be old", got)
	}
}

func TestMeterBelievesNoSampleOnlyOfAnIdleGPU(t *testing.T) {
	node, meter := metered(t, "t4")
	do(t, node.AddProcess(0, simnode.WholeGPU, 10, 1))
	gpus, err := meter.Read(t.Context())
	do(t, err)
	if got := uses(t, gpus, 0)[0].SM; got == nil || *got != 0 {
		t.Errorf("SM %+v of an idle GPU's process, want 0", got)
	}
	do(t, node.SetUtilization(0, 10, 50))
	defer node.InjectFault("DeviceGetProcessUtilization", simnode.Fault{Return: nvml.NotFound})()
	gpus, err = meter.Read(t.Context())
	do(t, err)
	if got := uses(t, gpus, 0)[0].SM; got != nil {
		t.Errorf("SM %+v of a busy GPU without samples, want unknown", got)
	}
}

func TestMeterReadsPartitions(t *testing.T) {
	node, meter := metered(t, "a30x4+all-balanced")
	do(t, node.AddProcess(1, 0, 10, 1<<30), node.AddProcess(1, 2, 11, 2<<30))
	uses, err := meter.Read(t.Context())
	do(t, err)
	gpus, err := nvml.Scan(node)
	do(t, err)
	for i, gpu := range gpus {
		var got sharing.GPUUtilization
		for _, use := range uses {
			if use.GPU == gpu.UUID {
				got = use
			}
		}
		if got.SM != nil || len(got.Units) != len(gpu.Partitions) {
			t.Fatalf("GPU %d: %+v, want %d partitions and no SM use", i, got, len(gpu.Partitions))
		}
		for _, unit := range got.Units {
			var want []sharing.ProcessUtilization
			switch {
			case i == 1 && unit.Unit == gpu.Partitions[0].UUID:
				want = []sharing.ProcessUtilization{{PID: 10, Memory: new(float64(1 << 30))}}
			case i == 1 && unit.Unit == gpu.Partitions[2].UUID:
				want = []sharing.ProcessUtilization{{PID: 11, Memory: new(float64(2 << 30))}}
			default:
				want = []sharing.ProcessUtilization{}
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
		gpus, err := meter.Read(t.Context())
		if len(gpus) != want || (err != nil) != failed {
			t.Fatalf("%d GPUs, %v; want %d", len(gpus), err, want)
		}
	}
	do(t, node.Lose(3))
	counts(7, true)
	do(t, node.Heal(3))
	counts(8, false)
	do(t, node.Remove(0)) // All others move up: handles must be looked up anew.
	for range 9 {
		if gpus, err := meter.Read(t.Context()); err == nil && len(gpus) == 7 {
			break
		}
	}
	counts(7, false)
	if _, err := node.Add(""); err != nil {
		t.Fatal(err)
	}
	for range 9 {
		if gpus, err := meter.Read(t.Context()); err == nil && len(gpus) == 8 {
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
	_, err := node.InjectGPUFault(2, "DeviceGetComputeRunningProcesses", simnode.Fault{Return: nvml.Unknown})
	do(t, err)
	gpus, err := meter.Read(t.Context())
	if !errors.Is(err, nvml.Unknown) || len(gpus) != 8 {
		t.Fatalf("%d GPUs, %v", len(gpus), err)
	}
	missing := 0
	for _, gpu := range gpus {
		if gpu.Units == nil {
			missing++
		}
	}
	if missing != 1 {
		t.Errorf("%d GPUs without processes, want 1", missing)
	}
}

func TestMeterEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node, meter := metered(t, "l40sx8")
		_, err := node.InjectGPUFault(2, "DeviceGetMemoryInfo", simnode.Fault{Delay: 20 * time.Second})
		do(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		began := time.Now()
		if _, err := meter.Read(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want that of the context", err)
		}
		if took := elapsed(began); took > time.Second {
			t.Errorf("took %s", took)
		}
		// Another reading leaves out that GPU.
		gpus, err := meter.Read(t.Context())
		if len(gpus) != 7 || err == nil {
			t.Errorf("%d GPUs, %v; want 7 and what is wrong with the eighth", len(gpus), err)
		}
		pass(time.Minute) // The call comes back in the end, and so does its goroutine.
	})
}

// boastful is a driver whose GPUs are busier than they can be.
type boastful struct{ nvml.Library }

func (boastful) DeviceGetUtilizationRates(nvml.Device) (nvml.Utilization, error) {
	return nvml.Utilization{GPU: 1<<32 - 1}, nil
}

func TestMeterBelievesNoNonsense(t *testing.T) {
	node, err := simnode.New("t4")
	do(t, err)
	gpus, err := nvml.NewMeter(boastful{node}).Read(t.Context())
	do(t, err)
	if got := gpus[0].SM; got != nil || gpus[0].Memory == nil {
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
	gpus, err := nvml.NewMeter(drawing{node}).Read(t.Context())
	do(t, err)
	if got := uses(t, gpus, 0); len(got) != 1 || got[0].Memory == nil || *got[0].Memory != 3<<30 {
		t.Errorf("processes %+v, want one with 3 GiB", got)
	}
}
