package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// component is a process of the cluster, which tests stop and start.
type component struct {
	name    string
	log     string
	command func() *exec.Cmd
	running *exec.Cmd
	ended   chan struct{}
}

// component starts a process that ends with the test; its log is shown if the
// test fails.
func (c *cluster) component(t *testing.T, name string, command func() *exec.Cmd) *component {
	t.Helper()
	started := &component{name: name, log: filepath.Join(c.work, name+".log"), command: command}
	started.start(t)
	t.Cleanup(func() {
		started.stop(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("%s's log ends:\n%s", name, tail(started.log))
		}
	})
	return started
}

// kubernetes is a component that this binary holds.
func (c *cluster) kubernetes(t *testing.T, name string, arguments ...string) *component {
	t.Helper()
	return c.component(t, name, func() *exec.Cmd {
		command := exec.Command("/proc/self/exe", arguments...)
		command.Env = append(os.Environ(), role+"="+name)
		return command
	})
}

func (p *component) start(t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	p.running, p.ended = p.command(), make(chan struct{})
	p.running.Stdout, p.running.Stderr = log, log
	if err := p.running.Start(); err != nil {
		t.Fatalf("start %s: %v", p.name, err)
	}
	go func(running *exec.Cmd, ended chan struct{}) {
		_ = running.Wait()
		close(ended)
	}(p.running, p.ended)
}

// stop sends the signal and waits for the end, at last by force.
func (p *component) stop(signal syscall.Signal) {
	_ = p.running.Process.Signal(signal)
	select {
	case <-p.ended:
	case <-time.After(15 * time.Second):
		_ = p.running.Process.Kill()
		<-p.ended
	}
}

func tail(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(content[max(0, len(content)-4000):])
}
