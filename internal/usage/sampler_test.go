package usage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

type meter struct {
	gpus []sharing.GPUUtilization
	err  error
}

func (m meter) Read(context.Context) ([]sharing.GPUUtilization, error) { return m.gpus, m.err }

type watched struct {
	containers map[string]sharing.Container
	err        error
}

func (w watched) Containers() (map[string]sharing.Container, error) { return w.containers, w.err }

// gpu is a GPU with those processes.
func gpu(pids ...int) []sharing.GPUUtilization {
	unit := sharing.UnitProcesses{Unit: "GPU-a"}
	for _, pid := range pids {
		unit.Processes = append(unit.Processes, sharing.ProcessUtilization{PID: pid})
	}
	return []sharing.GPUUtilization{{GPU: "GPU-a", Units: []sharing.UnitProcesses{unit}}}
}

func text(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }

// stat is the stat file of a process that started at the time.
func stat(start int) *fstest.MapFile {
	return text(fmt.Sprintf("1 (work) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", start))
}

func inPod(id string) *fstest.MapFile { return text("0::/kubepods/pod" + uid + "/" + id + "\n") }

// host is the /proc of a host 100 s after boot.
func host() fstest.MapFS {
	return fstest.MapFS{
		"uptime": text("100.00 1.00\n"), "1/cgroup": text("0::/init.scope\n"), "self/cgroup": text("0::/kubepods/pod" + uid + "/" + other + "\n"),
		"10/stat": stat(5000), "10/cgroup": inPod(id),
		"11/stat": stat(5000), "11/cgroup": text("0::/user.slice\n"),
	}
}

var main = sharing.Container{Namespace: "ns", Pod: "one", Name: "main"}

func running() watched { return watched{containers: map[string]sharing.Container{id: main}} }

func TestMeasureOwners(t *testing.T) {
	inContainer := sharing.ProcessOwner{Container: main}
	unreadable := sharing.ProcessOwner{Cause: sharing.CauseUnreadable}
	outside := sharing.ProcessOwner{Cause: sharing.CauseNoContainer}
	for _, test := range []struct {
		name       string
		pids       []int
		change     func(fstest.MapFS)
		containers Containers
		want       map[int]sharing.ProcessOwner
		errors     map[sharing.AttributionStage]int
	}{
		{name: "one in a container, one on the host", pids: []int{10, 11}, want: map[int]sharing.ProcessOwner{10: inContainer, 11: outside}},
		{
			name: "an MPS server in a pod's container", pids: []int{10, 11}, want: map[int]sharing.ProcessOwner{10: {Cause: sharing.CauseMPSServer}, 11: outside},
			change: func(proc fstest.MapFS) {
				proc["10/comm"], proc["11/comm"] = text("nvidia-cuda-mps\n"), text("nvidia-cuda-mp\n")
			},
		},
		{name: "no process", want: map[int]sharing.ProcessOwner{}},
		{
			name: "a container that no pod has", pids: []int{10}, containers: watched{containers: map[string]sharing.Container{other: main}},
			want: map[int]sharing.ProcessOwner{10: outside},
		},
		{
			name: "one has ended", pids: []int{10, 12}, want: map[int]sharing.ProcessOwner{10: inContainer, 12: unreadable},
			errors: map[sharing.AttributionStage]int{sharing.StageProcess: 1},
		},
		{
			name: "all have ended, in the kernel's first namespace", pids: []int{12}, want: map[int]sharing.ProcessOwner{12: unreadable},
			change: func(proc fstest.MapFS) {
				proc["self/ns/pid"] = &fstest.MapFile{Data: []byte(initialNamespace), Mode: fs.ModeSymlink}
			},
			errors: map[sharing.AttributionStage]int{sharing.StageProcess: 1},
		},
		{
			name: "the driver's IDs are of another namespace", pids: []int{12, 13},
			errors: map[sharing.AttributionStage]int{sharing.StageProcess: 1},
		},
		{
			name: "the ID went to a process that started after the driver was asked", pids: []int{10, 11}, want: map[int]sharing.ProcessOwner{10: unreadable, 11: outside},
			change: func(proc fstest.MapFS) { proc["10/stat"] = stat(10001) },
			errors: map[sharing.AttributionStage]int{sharing.StageProcess: 1},
		},
		{
			name: "started in the tick in which the driver was asked", pids: []int{10}, want: map[int]sharing.ProcessOwner{10: inContainer},
			change: func(proc fstest.MapFS) { proc["10/stat"] = stat(10000) },
		},
		{
			name: "in a container of its own", pids: []int{10},
			change: func(proc fstest.MapFS) { proc["1/cgroup"], proc["self/cgroup"] = text("0::/\n"), text("0::/\n") },
			errors: map[sharing.AttributionStage]int{sharing.StageProcess: 1},
		},
		{
			name: "in a pod whose containers share their processes", pids: []int{10},
			change: func(proc fstest.MapFS) { proc["1/cgroup"] = inPod(id) },
			errors: map[sharing.AttributionStage]int{sharing.StageProcess: 1},
		},
		{
			name: "containers not followed any more", pids: []int{10, 11},
			containers: watched{containers: map[string]sharing.Container{id: main}, err: errors.New("forbidden")},
			want:       map[int]sharing.ProcessOwner{10: inContainer, 11: outside},
			errors:     map[sharing.AttributionStage]int{sharing.StagePods: 1},
		},
		{
			name: "containers not watched", pids: []int{10}, containers: watched{err: errors.New("no")},
			errors: map[sharing.AttributionStage]int{sharing.StagePods: 1},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			proc := host()
			if test.change != nil {
				test.change(proc)
			}
			containers := test.containers
			if containers == nil {
				containers = running()
			}
			sampler := NewSampler(Options{Meter: meter{gpus: gpu(test.pids...)}, Proc: proc, Containers: containers, Logger: slog.New(slog.DiscardHandler)})
			got := sampler.Measure(t.Context())
			if diff := cmp.Diff(test.want, got.Owners); diff != "" {
				t.Errorf("owners (-want +got):\n%s", diff)
			}
			for _, stage := range sharing.AttributionStages() {
				if got.Errors[stage] != test.errors[stage] {
					t.Errorf("errors %v, want %v", got.Errors, test.errors)
				}
			}
		})
	}
}

// reusing is a /proc in which the process's ID becomes another's while it is read.
type reusing struct{ fstest.MapFS }

func (r *reusing) Open(name string) (fs.File, error) {
	if name == "10/cgroup" {
		r.MapFS["10/stat"] = stat(6000)
	}
	return r.MapFS.Open(name)
}

func (r *reusing) ReadFile(name string) ([]byte, error) {
	file, err := r.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return r.MapFS.ReadFile(name)
}

func TestMeasureReusedID(t *testing.T) {
	sampler := NewSampler(Options{Meter: meter{gpus: gpu(10)}, Proc: &reusing{MapFS: host()}, Containers: running(), Logger: slog.New(slog.DiscardHandler)})
	want := map[int]sharing.ProcessOwner{10: {Cause: sharing.CauseUnreadable}}
	if diff := cmp.Diff(want, sampler.Measure(t.Context()).Owners); diff != "" {
		t.Errorf("owners (-want +got):\n%s", diff)
	}
}

func TestMeasureLogsAnErrorOnce(t *testing.T) {
	var log strings.Builder
	proc := host()
	proc["1/cgroup"] = inPod(other)
	unwatched := watched{err: errors.New("no")}
	sampler := NewSampler(Options{Meter: meter{gpus: gpu(10), err: errors.New("GPU 3 is slow")}, Proc: proc, Containers: unwatched, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for range 3 {
		sampler.Measure(t.Context())
	}
	if lines := strings.Count(log.String(), "\n"); lines != 3 {
		t.Errorf("%d lines, want one for each stage:\n%s", lines, &log)
	}
	// An error that returns after a success is logged again.
	proc["1/cgroup"] = text("0::/init.scope\n")
	sampler.options.Containers = running()
	sampler.Measure(t.Context())
	proc["1/cgroup"] = inPod(other)
	sampler.Measure(t.Context())
	if lines := strings.Count(log.String(), "hostPID"); lines != 2 {
		t.Errorf("%d lines about the namespace, want 2:\n%s", lines, &log)
	}
}

// TestMeasureForNobody checks that if containers are not watched, owners are not looked up, without an error.
func TestMeasureForNobody(t *testing.T) {
	var log strings.Builder
	sampler := NewSampler(Options{Meter: meter{gpus: gpu(10)}, Proc: host(), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	got := sampler.Measure(t.Context())
	if !got.Unwatched || got.Owners != nil || len(got.GPUs) != 1 || len(got.Errors) > 0 || log.Len() > 0 {
		t.Errorf("measured %+v, logged %q", got, &log)
	}
}

func BenchmarkOwners400(b *testing.B) {
	proc := host()
	pids := make([]int, 400)
	for i := range pids {
		pids[i] = 1000 + i
		proc[fmt.Sprintf("%d/stat", pids[i])], proc[fmt.Sprintf("%d/cgroup", pids[i])] = stat(100), inPod(id)
	}
	root := b.TempDir()
	if err := os.CopyFS(root, proc); err != nil {
		b.Fatal(err)
	}
	sampler := NewSampler(Options{Meter: meter{gpus: gpu(pids...)}, Proc: os.DirFS(root), Containers: running(), Logger: slog.New(slog.DiscardHandler)})
	b.ReportAllocs()
	for b.Loop() {
		if got := sampler.Measure(b.Context()); len(got.Owners) != len(pids) {
			b.Fatalf("%d owners", len(got.Owners))
		}
	}
}
