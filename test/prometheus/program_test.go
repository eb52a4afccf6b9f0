package prometheus

import (
	"bytes"
	"os/exec"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience is how long anything may take on a slow machine.
const patience = 90 * time.Second

// process is a program that runs until the test ends.
type process struct {
	name  string
	mu    sync.Mutex
	text  bytes.Buffer
	wrote chan struct{}
	ended chan struct{}
}

// start starts a program and has it ended, with SIGTERM, when the test ends.
func start(t *testing.T, path string, arguments ...string) *process {
	t.Helper()
	p := &process{name: path, wrote: make(chan struct{}, 1), ended: make(chan struct{})}
	command := exec.Command(path, arguments...)
	command.Dir = t.TempDir()
	command.Stdout, command.Stderr = p, p
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = command.Wait() // How it ended is in its output.
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = command.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(patience):
			_ = command.Process.Kill()
			t.Errorf("%s did not end", path)
		}
		if t.Failed() {
			t.Logf("%s:\n%s", path, p.output())
		}
	})
	return p
}

// Write implements io.Writer for the program's output.
func (p *process) Write(data []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text.Write(data)
	select {
	case p.wrote <- struct{}{}:
	default:
	}
	return len(data), nil
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.String()
}

// await waits until the program has written what the expression matches, and
// returns its first group.
func (p *process) await(t *testing.T, written *regexp.Regexp) string {
	t.Helper()
	limit := time.After(patience)
	for {
		if match := written.FindStringSubmatch(p.output()); match != nil {
			return match[1]
		}
		select {
		case <-p.wrote:
		case <-p.ended:
			t.Fatalf("%s ended without having written %q", p.name, written)
		case <-limit:
			t.Fatalf("%s has not written %q", p.name, written)
		}
	}
}
