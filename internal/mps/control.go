package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/virgate/virgate/internal/wake"
)

// Environment is the environment of a daemon, and of the program that sends commands to it.
type Environment struct {
	// Device is the UUID of the only GPU or partition that the daemon sees.
	Device string
	// Pipe is the directory of the daemon's sockets, which clients must see under the same path
	// (NVIDIA's documentation of CUDA_MPS_PIPE_DIRECTORY). Log is the directory of its logs. Shm is
	// what it gets as /dev/shm, in the parent directory of Pipe; if empty, it has the /dev/shm of
	// this process.
	Pipe, Log, Shm string
}

// Control runs control daemons. All methods may be called from any goroutine, but only Ask may run
// while another call for the same unit does.
type Control interface {
	// Start starts a daemon in the foreground. The daemon may still end at once.
	Start(Environment) (Daemon, error)
	// Ask sends the daemon a command and returns its answer.
	Ask(ctx context.Context, env Environment, command string) (answer string, err error)
	// Clear ends all processes that still serve the pipe directory, servers included, whether this
	// run or an earlier one started them.
	Clear(ctx context.Context, env Environment) error
}

// Daemon is a control daemon that was started.
type Daemon interface {
	Ended() <-chan struct{}
	// Err returns why the daemon ended. Call it only after Ended is closed.
	Err() error
	// Queue returns what the daemon has printed about its clients.
	Queue() Queue
}

// ProgramName is the name of NVIDIA's program.
const ProgramName = "nvidia-cuda-mps-control"

// Program implements Control with NVIDIA's program.
type Program struct {
	// Find returns the program's path, and the driver root that it needs as its /.
	Find func() (root, path string, err error)
	// MultiUser makes one server, which runs as root, serve the clients of all users.
	MultiUser bool
	// Proc is the path of /proc.
	Proc   string
	Logger *slog.Logger
}

func (p Program) command(ctx context.Context, env Environment, arguments ...string) (*exec.Cmd, error) {
	root, path, err := p.Find()
	if err != nil {
		return nil, err
	}
	command := exec.CommandContext(ctx, path, arguments...)
	command.Dir, command.WaitDelay = "/", time.Second
	command.Env = []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"CUDA_VISIBLE_DEVICES=" + env.Device, "CUDA_MPS_PIPE_DIRECTORY=" + env.Pipe,
		"CUDA_MPS_LOG_DIRECTORY=" + env.Log,
	}
	// Its own process group: an interrupt from the terminal is meant for this program only.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if root != "/" {
		command = inDriverRoot(command, root, env)
	}
	return command, nil
}

// Start implements Control.
func (p Program) Start(env Environment) (Daemon, error) {
	arguments := []string{"-f"}
	if p.MultiUser {
		arguments = append(arguments, "-M") // NVIDIA documents it as -multiuser-server.
	}
	command, err := p.command(context.Background(), env, arguments...)
	if err != nil {
		return nil, err
	}
	if command.Path != selfPath && env.Shm != "" {
		command = inDriverRoot(command, "/", env)
	}
	d := &process{ended: make(chan struct{}), Output: NewOutput(p.Logger.With("device", env.Device))}
	command.Stdout, command.Stderr = d, d
	if err := command.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(d.ended)
		d.err = command.Wait()
	}()
	return d, nil
}

// process is a daemon that is a child of this process.
type process struct {
	*Output
	ended chan struct{}
	err   error
}

func (d *process) Ended() <-chan struct{} { return d.ended }

// Err implements Daemon. The last line that the program printed says more than its exit code.
func (d *process) Err() error {
	err := d.err
	if err == nil {
		err = errors.New("without an error")
	}
	if last := d.Last(); last != "" {
		err = fmt.Errorf("%w; it said: %s", err, last)
	}
	return err
}

// Ask implements Control. The program sends the lines of its standard input to the daemon.
func (p Program) Ask(ctx context.Context, env Environment, line string) (string, error) {
	command, err := p.command(ctx, env)
	if err != nil {
		return "", err
	}
	if deadline, limited := ctx.Deadline(); limited {
		// On a busy node this process may read the answer later than a second after the program has ended.
		command.WaitDelay = max(command.WaitDelay, time.Until(deadline))
	}
	var said, complained bytes.Buffer
	command.Stdin = strings.NewReader(line + "\n")
	command.Stdout = &said
	command.Stderr = &complained
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("%w: %s", err, strings.Join(strings.Fields(said.String()+" "+complained.String()), " "))
	}
	return said.String(), nil
}

const (
	// clearLimit is how long killed processes may take to end; the driver may hold one for a while.
	clearLimit    = 10 * time.Second
	clearInterval = 20 * time.Millisecond
)

// Clear implements Control. A server is a child process of the daemon and has the same environment.
func (p Program) Clear(ctx context.Context, env Environment) error {
	ctx, cancel := context.WithTimeout(ctx, clearLimit)
	defer cancel()
	for {
		left, err := p.processes(env)
		if err != nil || len(left) == 0 {
			return err
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if !wake.Sleep(ctx, clearInterval) {
			return fmt.Errorf("processes %v of %s were killed and are still there", left, env.Pipe)
		}
	}
}

// processes returns the live processes of NVIDIA's programs that use the pipe directory.
func (p Program) processes(env Environment) (pids []int, err error) {
	entries, err := os.ReadDir(p.Proc)
	if err != nil {
		return nil, err
	}
	variable := []byte("CUDA_MPS_PIPE_DIRECTORY=" + env.Pipe)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(p.Proc, e.Name(), "stat"))
		// "123 (nvidia-cuda-mps) S 1 …": the kernel keeps 15 characters of the name. A zombie has
		// ended.
		name, rest, _ := strings.Cut(string(stat), ") ")
		if err != nil || !strings.HasSuffix(name, "("+ProgramName[:15]) || strings.HasPrefix(rest, "Z") {
			continue
		}
		environ, err := os.ReadFile(filepath.Join(p.Proc, e.Name(), "environ"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for v := range bytes.SplitSeq(environ, []byte{0}) {
			if bytes.Equal(v, variable) {
				pids = append(pids, pid)
			}
		}
	}
	return pids, nil
}
