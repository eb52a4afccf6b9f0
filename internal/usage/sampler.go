package usage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/virgate/virgate/sharing"
)

// Meter reads how the boards are used. Sampler calls it from one goroutine.
type Meter interface {
	// Read returns the boards that can be read, by UUID, and what is wrong with
	// the others.
	Read(ctx context.Context) ([]sharing.BoardUse, error)
}

// Containers tell which containers run on this node. Sampler calls it from one
// goroutine, and it must answer from memory.
type Containers interface {
	// Containers returns the containers by ID, without the runtime's "://"
	// prefix, and the error that keeps them unknown, and then nil, or as they were
	// last seen. What it returns is not changed by either side.
	Containers() (map[string]sharing.Container, error)
}

// Options are what a Sampler needs.
type Options struct {
	Meter Meter
	// Proc is the host's /proc.
	Proc fs.FS
	// Containers may be nil; nothing is attributed then.
	Containers Containers
	Logger     *slog.Logger
}

// Sampler measures the use of the boards by process, with the container of each
// process. One goroutine uses it.
type Sampler struct {
	options Options
	log     *slog.Logger
	cgroups cgroups
	// said is what was last logged of each stage.
	said map[sharing.UseStage]string
}

// NewSampler returns a sampler that has measured nothing yet.
func NewSampler(options Options) *Sampler {
	return &Sampler{
		options: options, log: options.Logger.With("component", "usage"),
		cgroups: newCgroups(), said: map[sharing.UseStage]string{},
	}
}

// ErrNoContainers says that nobody tells which containers run on the node.
var ErrNoContainers = errors.New("the containers of this node are not watched")

// Measure measures now. It never fails: what could not be read is missing, and
// counted. It returns at the latest a few seconds later, and at once when ctx
// ends.
func (s *Sampler) Measure(ctx context.Context) sharing.Measurement {
	m := sharing.Measurement{Errors: map[sharing.UseStage]int{}}
	before := uptime(s.options.Proc)
	var err error
	m.Boards, err = s.options.Meter.Read(ctx)
	s.note(&m, sharing.StageDriver, err)

	containers, err := s.containers()
	s.note(&m, sharing.StagePods, err)
	certain, foreign := seesHost(s.options.Proc, s.cgroups)
	if err != nil && containers == nil || foreign != nil {
		s.note(&m, sharing.StageProcess, foreign)
		return m
	}
	owners, absent, unreadable := s.owners(m.Boards, containers, before)
	if absent > 0 && absent == len(owners) && !certain {
		s.note(&m, sharing.StageProcess, fmt.Errorf("no process that the driver names is in /proc: %w", errForeign))
		return m
	}
	s.note(&m, sharing.StageProcess, nil)
	m.Owners, m.Errors[sharing.StageProcess] = owners, unreadable
	return m
}

func (s *Sampler) containers() (map[string]sharing.Container, error) {
	if s.options.Containers == nil {
		return nil, ErrNoContainers
	}
	return s.options.Containers.Containers()
}

// owners looks at each process once, and counts those that it could not read and
// those among them that are not in /proc.
func (s *Sampler) owners(boards []sharing.BoardUse, containers map[string]sharing.Container, at ticks) (owners map[int]sharing.Owner, absent, unreadable int) {
	owners = map[int]sharing.Owner{}
	for _, board := range boards {
		for _, unit := range board.Units {
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
				owners[process.PID] = sharing.Owner{Cause: sharing.CauseUnreadable}
			}
		}
	}
	return owners, absent, unreadable
}

func (s *Sampler) owner(cgroup string, containers map[string]sharing.Container) sharing.Owner {
	id := s.cgroups.container(cgroup)
	if container, known := containers[id]; known && id != "" {
		return sharing.Owner{Container: container}
	}
	return sharing.Owner{Cause: sharing.CauseNoContainer}
}

// note counts an error, and logs it when it is a new one.
func (s *Sampler) note(m *sharing.Measurement, stage sharing.UseStage, err error) {
	if err == nil {
		s.said[stage] = ""
		return
	}
	m.Errors[stage]++
	if text := err.Error(); text != s.said[stage] {
		s.said[stage] = text
		s.log.Warn("use not known in full", "stage", stage, "error", err)
	}
}
