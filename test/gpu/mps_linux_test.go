package gpu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/shortdir"
)

// TestMain is also the program with which the supervisor of TestMPS starts a daemon.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[2] == mps.InDriverRoot {
		_, _ = fmt.Fprintln(os.Stderr, mps.EnterDriverRoot(os.Args[3:]))
		os.Exit(1) //nolint:forbidigo // This is a main.
	}
	os.Exit(m.Run()) //nolint:forbidigo // This is a main.
}

const (
	mpsShares = 4
	// fits is what a program allocates first.
	fits = 256 << 20
	// success and tooMuch are names of CUDA's results.
	success = "CUDA_SUCCESS"
	tooMuch = "CUDA_ERROR_OUT_OF_MEMORY"
)

// TestMPS shares an idle GPU by MPS, with NVIDIA's daemon and CUDA programs that run as in pods. It
// checks that each program gets its share and no more, and that nothing is left at the end.
func TestMPS(t *testing.T) {
	program(t)
	control, err := exec.LookPath(mps.ProgramName)
	if err != nil {
		t.Skip(err)
	}
	cuda := os.Getenv("CUDA_CLIENT")
	if cuda == "" {
		t.Skip("no $CUDA_CLIENT: run.sh sets it to the program of test/gpu/cudaclient")
	}
	if os.Geteuid() != 0 {
		t.Skip("mounts and namespaces require root")
	}
	lib := open(t)
	gpu := idle(t, lib)
	of := "GPU " + strconv.Itoa(gpu.Index)

	n := newMPS(t, control, gpu)
	whole := start(t, cuda, nil, gpu.Memory, "CUDA_VISIBLE_DEVICES="+gpu.UUID)
	note(t, of, "CUDA program without MPS", whole.report)
	must(t, whole.end())

	limit := sharing.NewMPSLimit(1, mpsShares, gpu.Memory)
	began := time.Now()
	n.client.Want([]mps.Unit{{
		ID: gpu.UUID, GPU: gpu.UUID, ThreadPercentage: limit.ThreadPercentage, PinnedMemory: limit.PinnedMemory, MemoryParts: mpsShares,
	}})
	n.await("a daemon that is ready", nodereport.MPSReady)
	note(t, of, "from the wish for a daemon until it is ready", elapsed(began))

	var pods []*cudaProgram
	for i := range 2 {
		began := time.Now()
		pod := n.pod(cuda, limit)
		pods = append(pods, pod)
		note(t, of, fmt.Sprintf("from the start of CUDA program %d until it has memory", i+1), elapsed(began))
		note(t, of, fmt.Sprintf("CUDA program %d with a share", i+1), pod.report)
		// A GPU gives out its multiprocessors by groups.
		if most := whole.report.Multiprocessors / mpsShares; pod.report.Multiprocessors > most || pod.report.Multiprocessors < most/2 {
			t.Errorf("program %d has %d multiprocessors, want at most %d (of %d) and not much less", i+1, pod.report.Multiprocessors, most, whole.report.Multiprocessors)
		}
		if pod.report.Free > limit.PinnedMemory || pod.report.Free < limit.PinnedMemory/2 {
			t.Errorf("program %d has %d bytes free, want at most %d and not much less", i+1, pod.report.Free, limit.PinnedMemory)
		}
		if pod.report.Second != tooMuch {
			t.Errorf("program %d allocates more than its limit: %s, want %s", i+1, pod.report.Second, tooMuch)
		}
	}
	servers := strings.Fields(n.ask("get_server_list"))
	if len(servers) != 1 {
		t.Fatalf("servers %q, want one", servers)
	}
	if clients := strings.Fields(n.ask("get_client_list " + servers[0])); len(clients) != len(pods) {
		t.Errorf("the server's clients are %q, want %d", clients, len(pods))
	}
	n.noteMemory(lib, of, servers[0])
	n.await("the daemon ready beside its programs", nodereport.MPSReady)
	for i, pod := range pods {
		if err := pod.end(); err != nil {
			t.Errorf("the end of program %d: %v", i+1, err)
		}
	}
	n.ask("get_server_list") // A daemon that has ended with its programs does not answer.
	n.await("the daemon ready after its programs", nodereport.MPSReady)

	began = time.Now()
	n.client.Want(nil)
	n.await("no daemon", "")
	note(t, of, "from the wish for no daemon until it is gone", elapsed(began))
	began = time.Now()
	n.stop()
	note(t, "", "end of the supervisor", elapsed(began))
	n.nothingLeft()
}

// idle returns a whole GPU that no program uses.
func idle(t *testing.T, lib nvml.Library) sharing.GPU {
	t.Helper()
	gpus, err := nvml.Scan(lib)
	must(t, err)
	for _, gpu := range gpus {
		device, err := lib.DeviceGetHandleByIndex(gpu.Index)
		if err != nil || gpu.MIG || !gpu.Health.Healthy() {
			continue
		}
		compute, err := lib.DeviceGetComputeRunningProcesses(device)
		must(t, err)
		graphics, err := lib.DeviceGetGraphicsRunningProcesses(device)
		must(t, err)
		mode, err := lib.DeviceGetComputeMode(device)
		must(t, err)
		if len(compute)+len(graphics) == 0 && mode == nvml.ComputeDefault {
			return gpu
		}
	}
	t.Skip("no healthy GPU without MIG that is idle and has the default compute mode")
	return sharing.GPU{}
}

// mpsNode is a supervisor of a GPU's daemon, and a client of it.
type mpsNode struct {
	t       *testing.T
	root    string
	gpu     sharing.GPU
	control mps.Program
	client  *mps.Client
	stop    func()
}

// newMPS starts both. The supervisor's root directory is a mount of its own, as in the chart's
// container.
func newMPS(t *testing.T, control string, gpu sharing.GPU) *mpsNode {
	t.Helper()
	root := shortdir.New(t)
	if err := syscall.Mount("tmpfs", root, "tmpfs", 0, "mode=755"); errors.Is(err, syscall.EPERM) {
		t.Skip("no right to mount")
	} else {
		must(t, err)
	}
	t.Cleanup(func() { must(t, syscall.Unmount(root, syscall.MNT_DETACH)) })
	must(t, syscall.Mount("", root, "", syscall.MS_SHARED, ""))
	logger := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	n := &mpsNode{t: t, root: root, gpu: gpu, control: mps.Program{
		Find:   func() (string, string, error) { return "/", control, nil },
		Proc:   "/proc",
		Logger: logger,
	}}
	// These checks change no setting of a GPU. The real compute mode stays the default, in which
	// programs with a share get their limits, too: it only does not refuse others.
	mode := sharing.DefaultComputeMode
	options := mps.Options{
		Root: root, Proc: "/proc", OwnShm: true, Control: n.control, Logger: logger,
		ComputeMode:    func(context.Context, string) (sharing.ComputeMode, error) { return mode, nil },
		SetComputeMode: func(_ context.Context, _ string, wanted sharing.ComputeMode) error { mode = wanted; return nil },
	}
	socket := filepath.Join(root, mps.SocketName)
	n.client = mps.NewClient(socket, logger)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	n.stop = func() { cancel(); running.Wait() }
	t.Cleanup(n.stop)
	running.Go(func() {
		if err := mps.Run(ctx, options); err != nil {
			t.Errorf("the supervisor: %v", err)
		}
	})
	await.Until(t, "the supervisor's socket", func() error {
		connection, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		return connection.Close()
	})
	running.Go(func() { _ = n.client.Run(ctx) })
	return n
}

// await waits until the GPU's daemon is in the phase; "" is for no daemon.
func (n *mpsNode) await(what string, want nodereport.MPSPhase) {
	n.t.Helper()
	await.Until(n.t, what, func() error {
		states, connected := n.client.States()
		switch {
		case !connected:
			return errors.New("not connected")
		case len(states) == 0 && want == "":
			return nil
		case len(states) == 1 && states[0].Phase == want && states[0].Restarts == 0:
			return nil
		case len(states) == 1 && (states[0].Phase == nodereport.MPSFailed || states[0].Restarts > 0):
			return await.Never("%+v", states[0])
		}
		return fmt.Errorf("%+v", states)
	})
}

// ask sends a command to the daemon.
func (n *mpsNode) ask(command string) string {
	n.t.Helper()
	dir := filepath.Join(n.root, n.gpu.UUID)
	answer, err := n.control.Ask(n.t.Context(), mps.Environment{
		Device: n.gpu.UUID, Pipe: filepath.Join(dir, "pipe"), Log: filepath.Join(dir, "log"),
	}, command)
	must(n.t, err)
	return answer
}

// noteMemory notes the GPU's memory that the server and its clients have, and which files they
// share.
func (n *mpsNode) noteMemory(lib nvml.Library, of, server string) {
	n.t.Helper()
	device, err := lib.DeviceGetHandleByIndex(n.gpu.Index)
	must(n.t, err)
	processes, err := lib.DeviceGetComputeRunningProcesses(device)
	must(n.t, err)
	var clients []string
	for _, p := range processes {
		if memory := fmt.Sprint(p.Memory>>20, " MiB"); strconv.Itoa(p.PID) == server {
			note(n.t, of, "memory of the MPS server", memory)
		} else {
			clients = append(clients, memory)
		}
	}
	note(n.t, of, "memory of the MPS clients", clients)
	clientProcesses, err := lib.DeviceGetMPSComputeRunningProcesses(device)
	note(n.t, of, "processes that are MPS clients", answer(len(clientProcesses), err))
	files := []string{}
	entries, err := os.ReadDir(filepath.Join(n.root, n.gpu.UUID, "shm"))
	must(n.t, err)
	for _, e := range entries {
		files = append(files, e.Name())
	}
	note(n.t, of, "files in the daemon's /dev/shm", files)
}

// nothingLeft checks that the supervisor has left no process and no mount.
func (n *mpsNode) nothingLeft() {
	n.t.Helper()
	environments, err := filepath.Glob("/proc/[0-9]*/environ")
	must(n.t, err)
	for _, path := range environments {
		environment, err := os.ReadFile(path)
		if pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil && bytes.Contains(environment, []byte("="+n.root)) {
			n.t.Errorf("process %d (%s) is left", pid, command(pid))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(n.t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " "+n.root+"/") {
			n.t.Errorf("a mount is left: %s", line)
		}
	}
	if _, err := os.Stat(filepath.Join(n.root, n.gpu.UUID)); !errors.Is(err, os.ErrNotExist) {
		n.t.Errorf("the unit's directory is left: %v", err)
	}
}

// pod starts a CUDA program as in a pod with a share.
func (n *mpsNode) pod(path string, limit sharing.MPSLimit) *cudaProgram {
	n.t.Helper()
	access := grant.MPSAccess(n.root, n.gpu.UUID, limit)
	var environment, binds []string
	for name, value := range access.Env {
		environment = append(environment, name+"="+value)
	}
	for _, m := range access.Mounts {
		if _, err := os.Stat(m.ContainerPath); err != nil {
			must(n.t, os.MkdirAll(m.ContainerPath, 0o755))
			n.t.Cleanup(func() {
				for dir := m.ContainerPath; os.Remove(dir) == nil; {
					dir = filepath.Dir(dir)
				}
			})
		}
		mode := "rw"
		if m.ReadOnly {
			mode = "ro"
		}
		binds = append(binds, m.HostPath, m.ContainerPath, mode)
	}
	return start(n.t, path, binds, limit.PinnedMemory, environment...)
}

// cudaProgram is a running cudaclient.
type cudaProgram struct {
	command *exec.Cmd
	input   io.Closer
	errors  bytes.Buffer
	report  struct {
		Multiprocessors int    `json:"multiprocessors"`
		Free            uint64 `json:"free"`
		Total           uint64 `json:"total"`
		Second          string `json:"second"`
	}
}

// inPod makes bind mounts, each of a path, the path in the pod and its mode, and runs the program
// after the --.
const inPod = `set -e
while [ "$1" != -- ]; do
	mount --bind "$1" "$2"
	mount -o "remount,bind,$3" "$2"
	shift 3
done
shift
exec "$@"`

// start starts a CUDA program in its own mount, PID and IPC namespaces, and returns when it has
// memory and has tried to allocate more than the limit.
func start(t *testing.T, path string, binds []string, limit uint64, environment ...string) *cudaProgram {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	arguments := slices.Concat([]string{"--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child", "sh", "-c", inPod, "pod"}, binds, []string{"--", path, strconv.Itoa(fits), strconv.FormatUint(limit+1<<20, 10)})
	p := &cudaProgram{command: exec.CommandContext(ctx, "unshare", arguments...)}
	p.command.Env = append(environment, "PATH="+os.Getenv("PATH"), "LD_LIBRARY_PATH="+os.Getenv("LD_LIBRARY_PATH"))
	p.command.Stderr = &p.errors
	var err error
	p.input, err = p.command.StdinPipe()
	must(t, err)
	output, err := p.command.StdoutPipe()
	must(t, err)
	must(t, p.command.Start())
	t.Cleanup(func() { cancel(); _ = p.end() })
	if err := json.NewDecoder(output).Decode(&p.report); err != nil {
		t.Fatalf("a CUDA program: %v: %v", err, p.end())
	}
	return p
}

// end lets the program end, and returns why it failed.
func (p *cudaProgram) end() error {
	_ = p.input.Close()
	if err := p.command.Wait(); err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(p.errors.String()))
	}
	return nil
}
