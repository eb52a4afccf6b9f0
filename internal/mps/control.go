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
)

// Environment is what a daemon and the questions to it are started with.
type Environment struct {
	// Device is the UUID of the GPU or the partition, the only one that the daemon sees.
	Device string
	// Pipe is the directory of its sockets, which clients must see under the same path
	// (NVIDIA's documentation of CUDA_MPS_PIPE_DIRECTORY), Log that of its logs, Shm what it must have as /dev/shm,
	// in the same directory as Pipe; empty for what this process has.
	Pipe, Log, Shm string
}

// Control runs control daemons. All methods may be called from any goroutine, and none but Ask
// for a unit while another one is.
type Control interface {
	// Start starts a daemon in the foreground. It may still end at once.
	Start(Environment) (Daemon, error)
	// Ask has the daemon carry out a command, and returns what it says.
	Ask(ctx context.Context, env Environment, command string) (answer string, err error)
	// Clear ends whatever still serves the pipe directory, servers too, of this run or an
	// earlier one.
	Clear(ctx context.Context, env Environment) error
}

// Daemon is a control daemon that was started.
type Daemon interface {
	Ended() <-chan struct{}
	// Err says why it ended, when it has.
	Err() error
	// Queue is what it has said of its clients.
	Queue() Queue
}

// ProgramName is the name of NVIDIA's program.
const ProgramName = "nvidia-cuda-mps-control"

// Program is Control by NVIDIA's program.
type Program struct {
	// Find finds it: its path, and the driver root that it needs as its /.
	Find func() (root, path string, err error)
	// MultiUser has one server, of root, serve the clients of all users.
	MultiUser bool
	// Proc is /proc.
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
	// Not in the terminal's group: an interrupt is for this program.
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
		arguments = append(arguments, "-M") // Of NVIDIA's documentation -multiuser-server.
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

// Err implements Daemon. What the program said last tells more than its exit code.
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

// Ask implements Control. The program sends the lines of its input to the daemon.
func (p Program) Ask(ctx context.Context, env Environment, line string) (string, error) {
	command, err := p.command(ctx, env)
	if err != nil {
		return "", err
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
	// clearLimit is how long killed processes may take to end: the driver may keep one for a
	// while.
	clearLimit    = 10 * time.Second
	clearInterval = 20 * time.Millisecond
)

// Clear implements Control. A server is a child of the daemon with its environment.
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
		select {
		case <-time.After(clearInterval):
		case <-ctx.Done():
			return fmt.Errorf("processes %v of %s were killed and are still there", left, env.Pipe)
		}
	}
}

// processes are the live processes of NVIDIA's programs with the pipe directory.
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
		// "123 (nvidia-cuda-mps) S 1 …": the kernel keeps 15 characters. A zombie has ended.
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
