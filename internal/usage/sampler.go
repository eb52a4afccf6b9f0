// Package usage finds out in which containers the processes on the GPUs run.
//
// The driver names processes by their IDs on the host. A process's cgroup has the ID
// of its container, and the pods of this node say whose container that is. This needs
// the host's /proc. Without the host's process IDs nothing is attributed, and that is
// reported, so no process is taken for another.
//
// The package only reads; package sharing evaluates the result. Read sampler.go first,
// then process.go.
package usage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/virgate/virgate/sharing"
)

// Meter reads how the GPUs are used. Sampler calls it from one goroutine.
type Meter interface {
	// Read returns the GPUs that can be read, by UUID, and the errors of the others.
	Read(ctx context.Context) ([]sharing.GPUUtilization, error)
}

// Containers knows this node's containers. One goroutine calls it; it must not wait.
type Containers interface {
	// Containers returns the containers by ID without the runtime's "://" prefix. With an
	// error they are nil, or the last known. Neither side changes the map.
	Containers() (map[string]sharing.Container, error)
}

// Options are what a Sampler needs.
type Options struct {
	Meter Meter
	// Proc is the host's /proc.
	Proc fs.FS
	// Containers may be nil; then nothing is attributed.
	Containers Containers
	Logger     *slog.Logger
}

// Sampler measures the GPUs' use by process and container. It is for one goroutine.
type Sampler struct {
	options Options
	log     *slog.Logger
	// logged is the last logged error of each stage.
	logged map[sharing.AttributionStage]string
}

// NewSampler returns a sampler that has measured nothing yet.
func NewSampler(options Options) *Sampler {
	return &Sampler{
		options: options, log: options.Logger.With("component", "usage"),
		logged: map[sharing.AttributionStage]string{},
	}
}

// ErrNoContainers says that the containers on the node are unknown.
var ErrNoContainers = errors.New("the containers of this node are not watched")

// Measure measures now. It does not fail: what could not be read is left out and
// counted. It returns within a few seconds, and at once when ctx ends.
func (s *Sampler) Measure(ctx context.Context) sharing.Measurement {
	m := sharing.Measurement{Errors: map[sharing.AttributionStage]int{}}
	before := uptime(s.options.Proc)
	var err error
	m.GPUs, err = s.options.Meter.Read(ctx)
	s.note(&m, sharing.StageDriver, err)

	containers, err := map[string]sharing.Container(nil), ErrNoContainers
	if s.options.Containers != nil {
		containers, err = s.options.Containers.Containers()
	}
	s.note(&m, sharing.StagePods, err)
	certain, foreign := checkHostPIDs(s.options.Proc)
	if err != nil && containers == nil || foreign != nil {
		s.note(&m, sharing.StageProcess, foreign)
		return m
	}
	owners, absent, unreadable := s.owners(m.GPUs, containers, before)
	if absent > 0 && absent == len(owners) && !certain {
		s.note(&m, sharing.StageProcess, fmt.Errorf("no process that the driver names is in /proc: %w", errForeign))
		return m
	}
	s.note(&m, sharing.StageProcess, nil)
	m.Owners, m.Errors[sharing.StageProcess] = owners, unreadable
	return m
}

// owners finds the owner of each process, and counts the processes that it could not
// read and, among them, those that are not in /proc.
func (s *Sampler) owners(gpus []sharing.GPUUtilization, containers map[string]sharing.Container, at ticks) (owners map[int]sharing.ProcessOwner, absent, unreadable int) {
	owners = map[int]sharing.ProcessOwner{}
	for _, gpu := range gpus {
		for _, unit := range gpu.Units {
			for _, process := range unit.Processes {
				if _, looked := owners[process.PID]; looked {
					continue
				}
				file, err := readCgroup(s.options.Proc, process.PID, at)
				if err == nil {
					owners[process.PID] = s.owner(file, containers)
					continue
				}
				unreadable++
				if errors.Is(err, fs.ErrNotExist) {
					absent++
				}
				owners[process.PID] = sharing.ProcessOwner{Cause: sharing.CauseUnreadable}
			}
		}
	}
	return owners, absent, unreadable
}

func (s *Sampler) owner(cgroup string, containers map[string]sharing.Container) sharing.ProcessOwner {
	id := containerOf(cgroup)
	if container, known := containers[id]; known && id != "" {
		return sharing.ProcessOwner{Container: container}
	}
	return sharing.ProcessOwner{Cause: sharing.CauseNoContainer}
}

// note counts an error, and logs it if it differs from the last one.
func (s *Sampler) note(m *sharing.Measurement, stage sharing.AttributionStage, err error) {
	if err == nil {
		s.logged[stage] = ""
		return
	}
	m.Errors[stage]++
	if text := err.Error(); text != s.logged[stage] {
		s.logged[stage] = text
		s.log.Warn("use of the GPUs only partly known", "stage", stage, "error", err)
	}
}
