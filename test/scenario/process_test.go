package scenario

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"syscall"
	"time"
)

// process is one virgate run.
type process struct {
	name    string
	control string
	command *exec.Cmd
	log     *transcript
	// ended is closed when the process has; err is then what Wait said.
	ended chan struct{}
	err   error
}

// launch starts virgate run and returns when it serves HTTP.
func (s *stage) launch(name string, environment, arguments []string) (*process, error) {
	if old := s.programs[name]; old != nil && !old.hasEnded() {
		return nil, fmt.Errorf("program %s still runs", name)
	}
	p := &process{
		name: name, control: filepath.Join(s.home, fmt.Sprintf("control%d.sock", len(s.all))),
		log: newTranscript(), ended: make(chan struct{}),
	}
	arguments = append([]string{
		"run", "--device-plugin-dir", s.plugins(), "--pod-resources-socket", s.podResources(),
		"--control-socket", p.control, "--listen", "127.0.0.1:0", "--rescan", "100ms", "--quiet-time", "200ms",
	}, arguments...)
	p.command = exec.Command(s.binary, arguments...)
	p.command.Env = append([]string{promptEnd}, environment...)
	p.command.Dir = s.home
	p.command.Stderr = p.log
	if err := p.command.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = p.command.Wait()
		close(p.ended)
		p.log.end()
	}()
	s.programs[name] = p
	s.all = append(s.all, p)
	_, err := p.address()
	return p, err
}

func (p *process) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

var listening = regexp.MustCompile(`msg="http listens" address=(\S+)`)

// address is where the program serves HTTP; it waits until it is known.
func (p *process) address() (string, error) {
	match, err := p.log.await(listening)
	if err != nil {
		return "", err
	}
	return match[1], nil
}

// terminate asks the process to end and returns when it has, with exit code 0.
func (p *process) terminate() error {
	if err := p.command.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("terminate: %w", err)
	}
	select {
	case <-p.ended:
		return p.err
	case <-time.After(patience):
		return errors.New("the program ignores SIGTERM")
	}
}

// kill ends the process if it still runs, and returns when it has ended.
func (p *process) kill() {
	_ = p.command.Process.Kill() // fails when it has ended already
	<-p.ended
}

// transcript is what a program has written so far. It is an io.Writer.
type transcript struct {
	mu   sync.Mutex
	text []byte
	// more is closed and replaced when there is more; over says that no more
	// will come.
	more chan struct{}
	over bool
}

func newTranscript() *transcript { return &transcript{more: make(chan struct{})} }

func (t *transcript) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	t.wake()
	return len(p), nil
}

func (t *transcript) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	t.wake()
}

func (t *transcript) wake() {
	close(t.more)
	t.more = make(chan struct{})
}

func (t *transcript) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// await waits until the pattern matches, and returns the match as
// regexp.FindStringSubmatch does.
func (t *transcript) await(pattern *regexp.Regexp) ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		t.mu.Lock()
		text, more, over := string(t.text), t.more, t.over
		t.mu.Unlock()
		if match := pattern.FindStringSubmatch(text); match != nil {
			return match, nil
		}
		if over {
			return nil, fmt.Errorf("the program has ended without having said %s", pattern)
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil, fmt.Errorf("the program does not say %s: %w", pattern, os.ErrDeadlineExceeded)
		}
	}
}
