// Package simmps replaces NVIDIA's nvidia-cuda-mps-control where there is no GPU: as a program
// (Main; test/mpscontrol builds it), and as goroutines of tests and of the demo (InProcess).
//
// A daemon has the files and commands of the real one: those of R580 on an H200, and those that
// NVIDIA's manual and users' reports describe. It refuses what the real one refuses: a second
// daemon in a pipe directory, a missing directory, a socket path that is too long, more clients
// than a server can have. How the real one answers a command with wrong arguments is not known.
//
// A memory limit is kept under the name of the device that it was set with, and reported under that
// name only. A server uses the limits set by ordinal; limits set by UUID have no effect.
//
// A connection (Connect) stands for a CUDA program. Like the real one it starts the server if it is
// the first client, and counts as a client until it is closed. It computes nothing. A server serves
// one user, or with -M all users as root. A client of another user waits until the clients before
// it have gone; the daemon then starts another server for it. A server whose user cannot enter the
// pipe directory ends (bottlerocket#4673). If a server is killed, its clients lose their connection
// and the next client gets a new server. After the command quit the daemon takes no more clients
// and ends when it has none; the real one checks after 0.2 s, then after longer and longer times.
//
// For tests, a file named fault in the log directory makes a daemon refuse to start (refuse), give
// no answers (hang), end without a message (die), ignore the command quit (stay), ignore limits
// (deaf), or be older than R580 (older): its next server makes a file in /dev/shm, and clients that
// do not see it fail (k8s-device-plugin#467).
package simmps

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// MaxClients is the number of clients that a server can have, from compute capability 7.0 on.
	MaxClients = 48
	// maxSocketPath is the longest path of a Unix socket (unix(7)).
	maxSocketPath = 107
	faultInterval = 20 * time.Millisecond
	// shmDir is where CUDA places shared memory.
	shmDir = "/dev/shm"
)

// errNone is the message of the real program, which then exits with 1.
var errNone = errors.New("Cannot find MPS control daemon process") //nolint:staticcheck // As NVIDIA's program says it.

// Environment has the values of the environment variables of the same names.
type Environment struct {
	Device, Pipe, Log string
	// Shm is the server's directory for memory that it shares with clients, which see it as
	// /dev/shm; if empty, no memory is shared.
	Shm string
	// MultiUser is the option -M.
	MultiUser bool
}

// Servers are the nvidia-cuda-mps-server processes of a daemon.
type Servers interface {
	// Start starts the server for the device. If the GPU is busy, for example, the first client
	// gets the error.
	Start(device string) (pid int, err error)
	Stop(device string, pid int)
	// AddClient and RemoveClient report the clients of the server.
	AddClient(device string, pid int) error
	RemoveClient(device string, pid int)
}

// killable are Servers whose processes can be killed.
type killable interface {
	// Ended is closed when the server that was started last has ended.
	Ended() <-chan struct{}
}

func (e Environment) fault() string {
	text, _ := os.ReadFile(filepath.Join(e.Log, "fault"))
	return strings.TrimSpace(string(text))
}

func (e Environment) socket() string { return filepath.Join(e.Pipe, "control") }

// daemon is a control daemon. Its mutex guards the rest.
type daemon struct {
	env     Environment
	servers Servers
	out     io.Writer
	quit    context.CancelFunc

	mu         sync.Mutex
	percentage float64
	// memory maps device names to limits; a limit is under the name that it was set with.
	memory map[string]string
	server *server
	// queue has the clients that wait for another server. changed is closed when one of them may
	// continue.
	queue   []*waiting
	changed chan struct{}
	// quitting is true after the command quit.
	quitting bool
}

// server has the limits that the daemon had when it started the server, or those set for the server
// later.
type server struct {
	pid, user  int
	percentage float64
	memory     map[string]string
	clients    []int
	// shared is the name of the file that clients must see, "-" for none.
	shared string
	// ended is closed once the server was killed.
	ended chan struct{}
}

type waiting struct{ pid, user int }

var errDied = errors.New("killed")

// serve runs the daemon until it gets the command quit, dies by a fault, or ctx ends. The end of
// ctx is like a kill: the daemon's files stay.
func serve(ctx context.Context, env Environment, servers Servers, out io.Writer) error {
	if env.fault() == "refuse" {
		//nolint:staticcheck // As NVIDIA's program says it.
		return errors.New("Cannot start MPS control daemon: the test wants it so")
	}
	if info, err := os.Stat(env.Pipe); err != nil || !info.IsDir() {
		//nolint:staticcheck // As NVIDIA's program says it.
		return fmt.Errorf("Failed to access the pipe directory %s", env.Pipe)
	}
	if len(env.socket()) > maxSocketPath {
		return errNone
	}
	lock, err := os.OpenFile(filepath.Join(env.Pipe, "control_lock"), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		//nolint:staticcheck // As NVIDIA's program says it.
		return errors.New("An instance of this daemon is already running")
	}
	_ = os.Remove(env.socket()) // Left by a daemon that was killed.
	listener, err := net.Listen("unix", env.socket())
	if err != nil {
		return errNone
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	defer func() { _ = listener.Close() }()
	if err := os.Chmod(env.socket(), 0o666); err != nil {
		return err
	}
	pidFile := filepath.Join(env.Pipe, "nvidia-cuda-mps-control.pid")
	if err := os.WriteFile(pidFile, fmt.Appendf(nil, "%d\n", os.Getpid()), 0o666); err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	d := &daemon{
		env:        env,
		servers:    servers,
		out:        out,
		percentage: 100,
		memory:     map[string]string{},
		changed:    make(chan struct{}),
	}
	d.say("Starting control daemon using socket %s", env.socket())
	quit, done := context.WithCancel(ctx)
	d.quit = done
	var group sync.WaitGroup
	defer group.Wait()
	defer done()
	defer context.AfterFunc(quit, func() { _ = listener.Close() })()
	group.Go(func() {
		for quit.Err() == nil {
			if env.fault() == "die" {
				stop(errDied)
			}
			select {
			case <-time.After(faultInterval):
			case <-quit.Done():
			}
		}
	})
	group.Go(func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				done()
				return
			}
			group.Go(func() {
				defer func() { _ = connection.Close() }()
				defer context.AfterFunc(quit, func() { _ = connection.Close() })()
				d.handle(quit, connection)
			})
		}
	})
	<-quit.Done()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server != nil {
		d.stopServer()
	}
	d.say("Exit with status 0")
	return errors.Join(os.Remove(env.socket()), os.Remove(pidFile))
}

// handle serves a connection: one command, or one client for as long as it is open.
func (d *daemon) handle(ctx context.Context, connection net.Conn) {
	lines := bufio.NewScanner(connection)
	if !lines.Scan() {
		return
	}
	if d.env.fault() == "hang" {
		<-ctx.Done()
		return
	}
	var pid, user int
	if n, _ := fmt.Sscanf(lines.Text(), "client %d %d", &pid, &user); n == 2 {
		ctx, gone := context.WithCancel(ctx)
		defer gone()
		go func() {
			lines.Scan() // Until the client closes the connection.
			gone()
		}()
		d.serveClient(ctx, connection, pid, user)
		return
	}
	_, _ = io.WriteString(connection, d.command(strings.Fields(lines.Text())))
}

// serveClient serves a client until ctx ends.
func (d *daemon) serveClient(ctx context.Context, connection net.Conn, pid, user int) {
	s, err := d.addClient(ctx, pid, user)
	if err != nil {
		_, _ = fmt.Fprintf(connection, "error %v\n", err)
		return
	}
	defer d.removeClient(s, pid)
	d.mu.Lock()
	answer := fmt.Sprintf("ok %d %g %s %s\n", s.pid, s.percentage, s.shared, s.memory[ordinal])
	d.mu.Unlock()
	_, _ = io.WriteString(connection, answer)
	select {
	case <-ctx.Done():
	case <-s.ended:
	}
}

// say prints a line in the format of a daemon of R580.
func (d *daemon) say(format string, values ...any) {
	now := time.Now().UTC().Format("2006-01-02 15:04:05.000")
	_, _ = fmt.Fprintf(d.out, "[%s Control %5d] %s\n", now, os.Getpid(), fmt.Sprintf(format, values...))
}

// addClient waits for a server of the user, and adds the client to it.
func (d *daemon) addClient(ctx context.Context, pid, user int) (*server, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.env.MultiUser {
		user = 0
	}
	me := &waiting{pid: pid, user: user}
	if d.server != nil && d.server.user == user && len(d.queue) == 0 {
		d.say("NEW CLIENT %d from user %d: Server already exists", pid, user)
	} else {
		d.say("NEW CLIENT %d from user %d: Server is not ready, push client to pending list", pid, user)
	}
	d.queue = append(d.queue, me)
	defer func() {
		d.queue = slices.DeleteFunc(d.queue, func(w *waiting) bool { return w == me })
		d.tellChange()
	}()
	for d.queue[0] != me || d.server != nil && d.server.user != user && len(d.server.clients) > 0 {
		changed := d.changed
		d.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		d.mu.Lock()
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	if d.quitting {
		return nil, errors.New("the daemon ends")
	}
	if err := d.haveServer(user); err != nil {
		return nil, err
	}
	if len(d.server.clients) == MaxClients {
		return nil, fmt.Errorf("the server has %d clients already", MaxClients)
	}
	if err := d.servers.AddClient(d.env.Device, pid); err != nil {
		return nil, err
	}
	d.server.clients = append(d.server.clients, pid)
	return d.server, nil
}

// haveServer starts a server for the user if the current one serves another user.
func (d *daemon) haveServer(user int) error {
	if d.server != nil && d.server.user == user {
		return nil
	}
	if d.server != nil {
		d.stopServer()
	}
	pid, err := d.servers.Start(d.env.Device)
	if err != nil {
		return err
	}
	d.say("Starting new server %d for user %d", pid, user)
	if err := mayEnter(d.env.Pipe, user); err != nil {
		d.servers.Stop(d.env.Device, pid)
		d.say("Server %d exited with status 1", pid)
		return err
	}
	d.server = &server{
		pid:        pid,
		user:       user,
		percentage: d.percentage,
		memory:     maps.Clone(d.memory),
		shared:     "-",
		ended:      make(chan struct{}),
	}
	if d.env.Shm != "" && d.env.fault() == "older" {
		d.server.shared = fmt.Sprintf("cuda.shm.%x.%x.1", user, pid)
		if err := os.WriteFile(filepath.Join(d.env.Shm, d.server.shared), []byte(d.env.Device), 0o666); err != nil {
			d.stopServer()
			return err
		}
	}
	if k, is := d.servers.(killable); is {
		go d.watch(d.server, k.Ended())
	}
	d.say("NEW SERVER %d: Ready", pid)
	return nil
}

// watch waits for the end of a server, and disconnects its clients if the daemon did not end it.
func (d *daemon) watch(s *server, ended <-chan struct{}) {
	<-ended
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server == s {
		d.say("Server %d exited with status 0", s.pid) // Also for a killed server.
		d.server = nil
		close(s.ended)
		d.tellChange()
	}
}

// stopServer ends the server. The caller holds the lock.
func (d *daemon) stopServer() {
	d.servers.Stop(d.env.Device, d.server.pid)
	if d.server.shared != "-" {
		_ = os.Remove(filepath.Join(d.env.Shm, d.server.shared))
	}
	d.say("Server %d exited with status 0", d.server.pid)
	d.server = nil
}

// mayEnter returns an error if the user, who is in no group, may not enter the directory or one of
// its parents. Root may enter every directory.
func mayEnter(dir string, user int) error {
	for ; user != 0; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if info.Mode()&0o001 == 0 && info.Sys().(*syscall.Stat_t).Uid != uint32(user) {
			return fmt.Errorf("user %d may not enter %s", user, dir)
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	return nil
}

func (d *daemon) removeClient(s *server, pid int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.servers.RemoveClient(d.env.Device, pid)
	if at := slices.Index(s.clients, pid); at >= 0 {
		s.clients = slices.Delete(s.clients, at, at+1)
	}
	d.tellChange()
	if d.quitting {
		d.quitIfIdle()
	}
}

// quitIfIdle ends the daemon if its server has no clients. The caller holds the lock.
func (d *daemon) quitIfIdle() {
	if d.server == nil || len(d.server.clients) == 0 {
		d.quit()
		return
	}
	d.say("Server %d has %d active worker threads. Server will not shutdown.", d.server.pid, len(d.server.clients))
}

// tellChange wakes the waiting clients. The caller holds the lock.
func (d *daemon) tellChange() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// command returns the daemon's answer to one of the commands in the manual.
func (d *daemon) command(words []string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var name string
	if len(words) > 0 {
		name, words = words[0], words[1:]
	}
	// of returns the server with the PID that the command begins with.
	of := func(arguments int) *server {
		if len(words) == arguments && d.server != nil && words[0] == strconv.Itoa(d.server.pid) {
			return d.server
		}
		return nil
	}
	switch {
	case name == "quit" && d.env.fault() == "stay":
		return ""
	case name == "quit":
		d.quitting = true
		d.quitIfIdle()
		return ""
	case name == "get_server_list" && d.server != nil:
		return fmt.Sprintln(d.server.pid)
	case name == "get_server_list":
		return ""
	case name == "get_server_status" && of(1) != nil:
		return "ACTIVE\n"
	case name == "get_client_list" && of(1) != nil:
		return lines(d.server.clients)
	case name == "ps":
		text := "PID       ID    SERVER    DEVICE             NAMESPACE    COMMAND\n"
		if d.server != nil {
			for i, pid := range d.server.clients {
				text += fmt.Sprintf("%-9d %-5d %-9d %-18.18s %-12d cuda\n", pid, i+1, d.server.pid, d.env.Device,
					4026531836)
			}
		}
		return text
	case name == "get_default_active_thread_percentage":
		return percent(d.percentage)
	case name == "set_default_active_thread_percentage" && len(words) == 1:
		return d.setPercentage(&d.percentage, words[0])
	case name == "get_active_thread_percentage" && of(1) != nil:
		return percent(d.server.percentage)
	case name == "set_active_thread_percentage" && of(2) != nil:
		return d.setPercentage(&d.server.percentage, words[1])
	case name == "get_default_device_pinned_mem_limit" && len(words) == 1:
		return fmt.Sprintln(shown(d.memory[words[0]]))
	case name == "set_default_device_pinned_mem_limit" && len(words) == 2:
		return d.setMemory(d.memory, words[0], words[1])
	case name == "get_device_pinned_mem_limit" && of(2) != nil:
		return fmt.Sprintln(shown(d.server.memory[words[1]]))
	case name == "set_device_pinned_mem_limit" && of(3) != nil:
		return d.setMemory(d.server.memory, words[1], words[2])
	}
	return fmt.Sprintf("Unknown command %q\n", name)
}

// ordinal is the number of the only device that a daemon sees.
const ordinal = "0"

// setMemory does not check that the device exists.
func (d *daemon) setMemory(limits map[string]string, device, value string) string {
	number, unit := strings.TrimRight(value, "GM"), value[max(0, len(value)-1):]
	if n, err := strconv.ParseUint(number, 10, 32); err != nil || n == 0 || unit != "G" && unit != "M" ||
		len(number)+1 != len(value) {
		return "Invalid device pinned memory limit\n"
	}
	if d.env.fault() != "deaf" {
		limits[device] = value
	}
	return ""
}

// shown returns a limit in the format of the real daemon: from 1 GB on, in whole gigabytes.
func shown(limit string) string {
	if mebibytes, is := strings.CutSuffix(limit, "M"); is {
		if n, _ := strconv.Atoi(mebibytes); n >= 1024 {
			return fmt.Sprintf("%dG", n/1024)
		}
	}
	return limit
}

func percent(value float64) string { return fmt.Sprintf("%.1f\n", value) }

func (d *daemon) setPercentage(value *float64, text string) string {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || n <= 0 || n > 100 {
		return "Invalid active thread percentage\n"
	}
	if d.env.fault() != "deaf" {
		*value = n
	}
	return percent(n)
}

func lines(numbers []int) (text string) {
	for _, n := range numbers {
		text += fmt.Sprintln(n)
	}
	return text
}

// ask sends a command to the daemon of the pipe directory.
func ask(ctx context.Context, env Environment, command string) (string, error) {
	connection, err := (&net.Dialer{}).DialContext(ctx, "unix", env.socket())
	if err != nil {
		return "", errNone
	}
	defer func() { _ = connection.Close() }()
	defer context.AfterFunc(ctx, func() { _ = connection.Close() })()
	if _, err := fmt.Fprintln(connection, command); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(connection)
	return string(answer), err
}

// Client is the connection of a CUDA program.
type Client struct {
	net.Conn
	// Server is the PID of the server. Percentage and Memory are the limits that it gives the
	// client.
	Server     int
	Percentage float64
	Memory     string
}

// Connect connects the process to the daemon of the pipe directory, as CUDA does when a program
// begins to use a GPU. Close disconnects it.
func Connect(ctx context.Context, pipe string, pid int) (*Client, error) {
	return ConnectAs(ctx, pipe, pid, os.Getuid())
}

// ConnectAs connects for a process of the user, and waits for a server that serves this user.
func ConnectAs(ctx context.Context, pipe string, pid, user int) (*Client, error) {
	connection, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(pipe, "control"))
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = connection.Close() })
	defer stop()
	c := &Client{Conn: connection}
	_, _ = fmt.Fprintf(connection, "client %d %d\n", pid, user)
	line, err := bufio.NewReader(connection).ReadString('\n')
	if text, refused := strings.CutPrefix(line, "error "); refused {
		err = errors.New(strings.TrimSpace(text))
	}
	if err != nil {
		_ = connection.Close()
		return nil, fmt.Errorf("MPS client failed to connect to the MPS control daemon or the MPS server: %w", err)
	}
	var shared string
	_, _ = fmt.Sscanf(line, "ok %d %g %s %s", &c.Server, &c.Percentage, &shared, &c.Memory)
	if shared != "-" {
		if _, err := os.Stat(filepath.Join(shmDir, shared)); err != nil {
			_ = connection.Close()
			return nil, fmt.Errorf("MPS client failed to open the server's memory: %w", err)
		}
	}
	return c, nil
}

// serverArgument makes the program run as a server, which does nothing until it is killed.
const serverArgument = "--simulated-server"

// Main runs the program and returns its exit code. The end of ctx is like a kill.
func Main(ctx context.Context, arguments []string, stdin io.Reader, stdout, stderr io.Writer) int {
	env := Environment{
		Device: os.Getenv("CUDA_VISIBLE_DEVICES"),
		Pipe:   os.Getenv("CUDA_MPS_PIPE_DIRECTORY"),
		Log:    os.Getenv("CUDA_MPS_LOG_DIRECTORY"),
	}
	if _, err := os.Lstat(filepath.Join(filepath.Dir(env.Pipe), "shm")); err == nil { // The unit has its own.
		env.Shm = shmDir
	}
	switch strings.Join(arguments, " ") {
	case serverArgument:
		<-ctx.Done()
		return 0
	case "-f", "-f -M":
		env.MultiUser = len(arguments) > 1
		if err := serve(ctx, env, &processes{}, stdout); err != nil {
			_, _ = fmt.Fprintln(stderr, err)
			return 1
		}
		return 0
	case "":
		for lines := bufio.NewScanner(stdin); lines.Scan(); {
			answer, err := ask(ctx, env, lines.Text())
			if err != nil {
				_, _ = fmt.Fprintln(stdout, err)
				return 1
			}
			_, _ = io.WriteString(stdout, answer)
		}
		return 0
	}
	_, _ = fmt.Fprintf(stderr, "usage: nvidia-cuda-mps-control [-f] [-M]\n")
	return 1
}

// processes implements Servers with child processes of the daemon's process.
type processes struct {
	command *exec.Cmd
	ended   chan struct{}
}

// Start, Stop, AddClient and RemoveClient implement Servers, and Ended killable.
func (p *processes) Start(string) (int, error) {
	path, err := os.Executable()
	if err != nil {
		return 0, err
	}
	command, ended := exec.Command(path, serverArgument), make(chan struct{})
	if err := command.Start(); err != nil {
		return 0, err
	}
	p.command, p.ended = command, ended
	go func() {
		defer close(ended)
		_ = command.Wait()
	}()
	return command.Process.Pid, nil
}

func (p *processes) Stop(string, int) {
	_ = p.command.Process.Kill()
	<-p.ended
}

func (p *processes) Ended() <-chan struct{} { return p.ended }

func (p *processes) AddClient(string, int) error { return nil }
func (p *processes) RemoveClient(string, int)    {}
