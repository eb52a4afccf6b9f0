// Package usage finds the containers in which the processes on the GPUs run.
//
// The driver identifies processes by their IDs on the host. A process's cgroup contains the ID of
// its container, and this node's pods tell whose container that is. This requires the host's /proc.
// Without the host's process IDs nothing is attributed, and that is reported, so that no process is
// mistaken for another.
//
// Clients names programs that have a GPU open but that the driver does not list.
//
// The package only reads; package sharing evaluates the result.
package usage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// Meter reads how the GPUs are used. Sampler calls it from one goroutine.
type Meter interface {
	// Read returns the GPUs that can be read, by UUID, and the errors of the others.
	Read(ctx context.Context) ([]sharing.GPUUtilization, error)
}

// Containers knows this node's containers. It is called from one goroutine and must not block.
type Containers interface {
	// Containers returns the containers by ID, without the runtime's "://" prefix. With an error,
	// the map is nil or the last known one. Neither side changes the map.
	Containers() (map[string]sharing.Container, error)
}

// Options are what a Sampler needs.
type Options struct {
	Meter Meter
	// Proc is the host's /proc.
	Proc fs.FS
	// Containers may be nil; then no process is attributed.
	Containers Containers
	Logger     *slog.Logger
}

// Sampler measures the GPUs' use by process and container. It must be used from one goroutine.
type Sampler struct {
	options Options
	log     *slog.Logger
	// logged is the last logged error of each stage.
	logged map[sharing.AttributionStage]string
}

// NewSampler returns a sampler that has measured nothing yet.
func NewSampler(options Options) *Sampler {
	return &Sampler{
		options: options,
		log:     options.Logger.With("component", "usage"),
		logged:  map[sharing.AttributionStage]string{},
	}
}

// Measure measures now. It does not fail: what could not be read is left out, and the errors are
// counted. It returns within a few seconds, and at once when ctx ends.
func (s *Sampler) Measure(ctx context.Context) sharing.Measurement {
	m := sharing.Measurement{Errors: map[sharing.AttributionStage]int{}}
	before := uptime(s.options.Proc)
	var err error
	m.GPUs, err = s.options.Meter.Read(ctx)
	s.note(&m, sharing.StageDriver, err)

	m.Unwatched = s.options.Containers == nil
	if m.Unwatched {
		return m
	}
	containers, err := s.options.Containers.Containers()
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

// owners finds the owner of each process. It counts the processes that it could not read
// (unreadable) and those among them that are not in /proc (absent).
func (s *Sampler) owners(
	gpus []sharing.GPUUtilization,
	containers map[string]sharing.Container,
	at ticks,
) (owners map[int]sharing.ProcessOwner, absent, unreadable int) {
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
					if isMPSServer(s.options.Proc, process.PID) {
						owners[process.PID] = sharing.ProcessOwner{Cause: sharing.CauseMPSServer}
					}
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

// isMPSServer reports whether the process is an NVIDIA MPS server, which does the work of other
// processes.
func isMPSServer(proc fs.FS, pid int) bool {
	name, _ := fs.ReadFile(proc, fmt.Sprintf("%d/comm", pid))
	return strings.TrimSpace(string(name)) == "nvidia-cuda-mps" // -server: the kernel keeps 15 characters.
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

// initialNamespace is the link of the kernel's initial PID namespace
// (PROC_PID_INIT_INO in Linux' include/linux/proc_ns.h).
const initialNamespace = "pid:[4026531836]"

// InInitialNamespace reports whether this process is in the kernel's initial PID namespace.
func InInitialNamespace(proc fs.FS) bool {
	link, err := fs.ReadLink(proc, "self/ns/pid")
	return err == nil && link == initialNamespace
}

var errForeign = errors.New("the host's process IDs are not visible; the pod needs hostPID: true")

// checkHostPIDs returns an error if the process IDs in proc are not the host's. In a PID namespace
// of its own, a program would find other processes under the driver's IDs.
//
// The kernel's initial namespace is certainly the host's. If the node is itself a container, that
// container is the host: its first process is then neither in a pod nor in this process's cgroup,
// and it is not certain that the driver uses that container's IDs.
func checkHostPIDs(proc fs.FS) (certain bool, err error) {
	if InInitialNamespace(proc) {
		return true, nil
	}
	first, err := fs.ReadFile(proc, "1/cgroup")
	if err != nil {
		return false, fmt.Errorf("look for the host's first process: %w", err)
	}
	self, err := fs.ReadFile(proc, "self/cgroup")
	if err != nil {
		return false, fmt.Errorf("look for this process: %w", err)
	}
	if string(first) == string(self) || isInPod(string(first)) {
		return false, errForeign
	}
	return false, nil
}

// ticks are hundredths of a second, the unit of times in /proc on every machine that
// has GPUs (USER_HZ, proc_pid_stat(5)).
type ticks uint64

// always is later than the start of every process.
const always ticks = math.MaxUint64

var errReused = errors.New("the process ID is another process's now")

// readCgroup reads the cgroup file of the process, which must have been running at the given time.
// The driver may name a process that has ended and whose ID is in use again, so the start time is
// read before and after.
func readCgroup(proc fs.FS, pid int, at ticks) (string, error) {
	before, err := readStart(proc, pid)
	if err != nil {
		return "", err
	}
	file, err := fs.ReadFile(proc, fmt.Sprintf("%d/cgroup", pid))
	if err != nil {
		return "", fmt.Errorf("read process %d: %w", pid, err)
	}
	after, err := readStart(proc, pid)
	if err != nil {
		return "", err
	}
	if before != after || after > at {
		return "", fmt.Errorf("process %d: %w", pid, errReused)
	}
	return string(file), nil
}

func readStart(proc fs.FS, pid int) (ticks, error) {
	file, err := fs.ReadFile(proc, fmt.Sprintf("%d/stat", pid))
	var start ticks
	if err == nil {
		start, err = parseStart(string(file))
	}
	if err != nil {
		return 0, fmt.Errorf("read process %d: %w", pid, err)
	}
	return start, nil
}

// parseStart returns when a process started, as time since boot: field 22 of its stat file. Field
// 2, the program's name, may contain spaces and parentheses.
func parseStart(stat string) (ticks, error) {
	name := strings.LastIndex(stat, ")")
	const afterName = 22 - 3
	if fields := strings.Fields(stat[name+1:]); name >= 0 && len(fields) > afterName {
		if start, err := strconv.ParseUint(fields[afterName], 10, 64); err == nil {
			return ticks(start), nil
		}
	}
	return 0, errors.New("no start time in its stat file")
}

// uptime returns the time since boot, or always if it cannot be read.
func uptime(proc fs.FS) ticks {
	file, err := fs.ReadFile(proc, "uptime")
	if err != nil {
		return always
	}
	seconds, _, _ := strings.Cut(string(file), " ")
	up, err := strconv.ParseFloat(seconds, 64)
	if err != nil || !(up >= 0 && up < math.MaxUint32) {
		return always
	}
	return ticks(math.Round(up * 100))
}

// The grammar of the two parts of a path in a process's cgroup file that matter:
//
//	pod       = ( start | "/" | "-" ) "pod" ( UUID with "-" or "_" | 32 hex digits )
//	container = 64 hex digits, between anything else
//
// The kubelet names a pod's cgroup by the pod's UID, in which its systemd driver writes
// "_" for "-"; a static pod has a hash of 32 digits instead (kubernetes v1.36,
// pkg/kubelet/cm/pod_container_manager_linux.go). Each runtime adds the container's ID
// in its own way, always with all 64 digits.
var (
	podPart = regexp.MustCompile(
		`(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:[^0-9a-f]|$)`)
	containerPart = regexp.MustCompile(`(?:^|[^0-9a-f])([0-9a-f]{64})(?:[^0-9a-f]|$)`)
)

// containerOf returns the ID of the pod's container in which the process runs; empty if there is
// none. file is the content of /proc/PID/cgroup of either version: lines of hierarchy, controllers
// and path (cgroups(7)).
//
// It is the first ID after the first pod: a runtime inside the container adds more IDs after it,
// and a node that is itself a container has its own ID before it.
func containerOf(file string) string {
	for _, path := range paths(file) {
		pod := podPart.FindStringIndex(path)
		if pod == nil {
			continue
		}
		// The last character of the pod's match may be the first of the ID's.
		if id := containerPart.FindStringSubmatch(path[pod[1]-1:]); id != nil {
			return id[1]
		}
	}
	return ""
}

func isInPod(file string) bool {
	return slices.ContainsFunc(paths(file), podPart.MatchString)
}

func paths(file string) (paths []string) {
	for line := range strings.Lines(file) {
		if parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3); len(parts) == 3 {
			paths = append(paths, parts[2])
		}
	}
	return paths
}
