package trace_test

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/nvml/trace"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/test/nvmltest"
)

var update = flag.Bool("update", false, "write the traces in testdata anew")

// simulated are the traces in testdata that a simulated node is the source of.
func simulated() []string { return []string{"a30x4+all-balanced", "empty", "t4"} }

func simulate(t *testing.T, name string) *simnode.Node {
	t.Helper()
	node, err := simnode.New(name)
	must(t, err)
	return node
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func parse(t *testing.T, data []byte) nvml.Library {
	t.Helper()
	lib, err := trace.Parse(data)
	must(t, err)
	return lib
}

// TestTraces checks that the traces in testdata match their nodes' answers.
func TestTraces(t *testing.T) {
	for _, name := range simulated() {
		t.Run(name, func(t *testing.T) {
			var written bytes.Buffer
			synctest.Test(t, func(t *testing.T) { // The energy that a GPU has used depends on the time.
				node := simulate(t, name)
				nvmltest.RunOnce(t, trace.Record(node, &written, trace.Options{}), nvmltest.Expect{
					GPUs: nvmltest.Unknown, Partitions: nvmltest.Unknown, Event: xid(node),
				})
			})
			path := filepath.Join("testdata", name+".jsonl")
			if *update {
				must(t, os.WriteFile(path, written.Bytes(), 0o644))
			}
			want, err := os.ReadFile(path)
			must(t, err)
			if diff := cmp.Diff(string(want), written.String()); diff != "" {
				t.Errorf("trace (-want +got):\n%s", diff)
			}
		})
	}
}

func xid(node *simnode.Node) func(*testing.T, int) {
	return func(t *testing.T, gpu int) { must(t, node.XID(gpu, 94, nvml.WholeGPU, nvml.WholeGPU)) }
}

// TestConformance runs the suite on every trace in testdata, including those of real nodes.
func TestConformance(t *testing.T) {
	paths, err := filepath.Glob("testdata/*.jsonl")
	must(t, err)
	if len(paths) < len(simulated()) {
		t.Fatalf("%d traces, want %d at least", len(paths), len(simulated()))
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			data, err := os.ReadFile(path)
			must(t, err)
			nvmltest.Run(t, func(t *testing.T) nvml.Library { return parse(t, data) },
				nvmltest.Expect{GPUs: nvmltest.Unknown, Partitions: nvmltest.Unknown})
		})
	}
}

// TestInventory checks that a node's trace gives the node's inventory.
func TestInventory(t *testing.T) {
	for _, name := range []string{"dgx-a100+all-balanced", "mixed", "empty"} {
		t.Run(name, func(t *testing.T) {
			var written bytes.Buffer
			want, err := nvml.Scan(trace.Record(simulate(t, name), &written, trace.Options{Plain: true}))
			must(t, err)
			got, err := nvml.Scan(parse(t, written.Bytes()))
			must(t, err)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("inventory (-node +trace):\n%s", diff)
			}
		})
	}
}

// TestMask checks that masked traces name no GPU, that masks are reproducible, and that everything else is
// unchanged.
func TestMask(t *testing.T) {
	record := func(options trace.Options) (string, int) {
		var written bytes.Buffer
		gpus, err := nvml.Scan(trace.Record(simulate(t, "a30x4+all-balanced"), &written, options))
		must(t, err)
		for _, gpu := range gpus {
			names := []string{strings.TrimPrefix(gpu.UUID, "GPU-")}
			for _, partition := range gpu.Partitions {
				names = append(names, strings.TrimPrefix(partition.UUID, "MIG-"))
			}
			for _, name := range names {
				if strings.Contains(written.String(), name) == options.Plain {
					continue
				}
				t.Errorf("%s in a trace with %+v", name, options)
			}
		}
		return written.String(), len(gpus)
	}
	masked, gpus := record(trace.Options{})
	if again, _ := record(trace.Options{}); sorted(again) != sorted(masked) {
		t.Error("two traces of one node differ")
	}
	plain, _ := record(trace.Options{Plain: true})
	if strings.Count(plain, "\n") != strings.Count(masked, "\n") || len(plain) != len(masked)+len("false")-len("true") {
		t.Error("a mask changes more than UUIDs")
	}
	seen, err := nvml.Scan(parse(t, []byte(masked)))
	if err != nil || len(seen) != gpus {
		t.Errorf("%d GPUs of a masked trace, error %v, want %d", len(seen), err, gpus)
	}
}

// TestReplay checks which answers a replay gives, and when.
func TestReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := parse(t, []byte(`{"trace":1,"masked":false}
{"call":"Init","error":{"call":"Init","return":9}}
{"call":"Init"}
{"call":"DeviceGetTemperature","arguments":[7],"answer":30}
{"call":"DeviceGetTemperature","arguments":[7],"error":{"call":"DeviceGetTemperature","return":15}}
{"call":"DeviceGetTemperature","arguments":[8],"answer":60}
{"call":"DeviceGetTemperature","arguments":[7],"answer":31}
{"call":"DeviceGetMigMode","arguments":[7],"answer":{"Current":false,"Pending":true}}
{"call":"EventSetWait","arguments":[1],"answer":{"Device":7,"Type":8,"Data":79,"GI":4294967295,"CI":4294967295}}
{"call":"EventSetWait","arguments":[1],"error":{"call":"EventSetWait","return":15}}
`))
		if err := lib.Init(); !errors.Is(err, nvml.DriverNotLoaded) {
			t.Errorf("first Init: %v, want DRIVER_NOT_LOADED", err)
		}
		if _, err := lib.DeviceGetTemperature(7); !errors.Is(err, nvml.Uninitialized) {
			t.Errorf("before Init: %v, want UNINITIALIZED", err)
		}
		must(t, lib.Init())
		for i, want := range []int{30, 0, 31, 31, 31} {
			got, err := lib.DeviceGetTemperature(7)
			if got != want || errors.Is(err, nvml.GPUIsLost) != (want == 0) {
				t.Errorf("reading %d: %d, %v, want %d", i, got, err, want)
			}
		}
		if got, err := lib.DeviceGetTemperature(8); got != 60 || err != nil {
			t.Errorf("another GPU: %d, %v, want 60", got, err)
		}
		if mode, err := lib.DeviceGetMigMode(7); mode != (nvml.MIGMode{Pending: true}) || err != nil {
			t.Errorf("MIG mode %+v, %v, want pending", mode, err)
		}
		if _, err := lib.DeviceGetUUID(7); !errors.Is(err, nvml.NotSupported) {
			t.Errorf("a call that the trace has not: %v, want NOT_SUPPORTED", err)
		}
		want := nvml.Event{Device: 7, Type: nvml.EventXIDCritical, Data: 79, GI: nvml.WholeGPU, CI: nvml.WholeGPU}
		if event, err := lib.EventSetWait(1, time.Minute); event != want || err != nil {
			t.Errorf("event %+v, %v, want %+v", event, err, want)
		}
		if _, err := lib.EventSetWait(1, time.Minute); !errors.Is(err, nvml.GPUIsLost) {
			t.Errorf("second wait: %v, want GPU_IS_LOST", err)
		}
		start := time.Now()
		_, err := lib.EventSetWait(1, time.Minute)
		took := time.Since(start) //nolint:forbidigo // in a synctest bubble: the time is simulated
		if !errors.Is(err, nvml.Timeout) || took != time.Minute {
			t.Errorf("third wait: %v after %s, want TIMEOUT after a minute", err, took)
		}
	})
}

// TestRecordEnds checks that a trace that cannot go on reports it once, ends with a whole line, and does not
// disturb the program.
func TestRecordEnds(t *testing.T) {
	full := errors.New("no space left on device")
	tests := []struct {
		name  string
		limit int
		to    func(*bytes.Buffer) writer
		want  error
	}{
		{"at its limit", 500, func(b *bytes.Buffer) writer { return b.Write }, trace.ErrFull},
		{"where nothing can be written", 0, func(*bytes.Buffer) writer { return func([]byte) (int, error) { return 0, full } }, full},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var written bytes.Buffer
			var failures []error
			lib := trace.Record(simulate(t, "t4"), test.to(&written), trace.Options{
				Limit: test.limit, Failed: func(err error) { failures = append(failures, err) },
			})
			gpus, err := nvml.Scan(lib)
			if len(gpus) != 1 || err != nil {
				t.Errorf("%d GPUs, %v, want 1", len(gpus), err)
			}
			if len(failures) != 1 || !errors.Is(failures[0], test.want) {
				t.Errorf("told %v, want once %v", failures, test.want)
			}
			if test.limit > 0 {
				if written.Len() > test.limit {
					t.Errorf("%d bytes, want %d at most", written.Len(), test.limit)
				}
				parse(t, written.Bytes())
			}
		})
	}
}

// TestRecordWaits checks that waits without an event are not recorded.
func TestRecordWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := simulate(t, "t4")
		var written bytes.Buffer
		lib := trace.Record(node, &written, trace.Options{})
		must(t, lib.Init())
		set, err := lib.EventSetCreate()
		must(t, err)
		before := written.Len()
		_, err = lib.EventSetWait(set, time.Second)
		if !errors.Is(err, nvml.Timeout) || written.Len() != before {
			t.Errorf("error %v, %d bytes more, want TIMEOUT and none", err, written.Len()-before)
		}
	})
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// sorted sorts the lines, as GPUs may be read concurrently.
func sorted(text string) string {
	lines := strings.Split(text, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
