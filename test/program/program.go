// Package program builds Virgate's programs and starts them, for tests that need a separate process. Tests
// within one process use internal/daemon.
package program

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/virgate/virgate/test/await"
)

// Patience is how long anything may take on a busy machine. A longer wait is an error.
const Patience = await.Patience

// Build builds the program of cmd/name as dir/name and returns that path. It uses the race detector if the test
// does. It reads the folders of all sources, because the go command reuses a cached pass until
// something changes that the test itself has read. The build cache keeps what go run links, so the next
// test with the same program need not link it again.
func Build(dir, name string) (string, error) {
	path := filepath.Join(dir, name)
	arguments := []string{"run", "-buildvcs=false", "-ldflags", "-s -w", "-exec", "cp"}
	if RaceDetector() {
		arguments = append(arguments, "-race")
	}
	source := "github.com/virgate/virgate/cmd/" + name
	const sources = `{{if .Module}}{{if .Module.Main}}{{.Dir}}{{range .EmbedFiles}}
{{$.Dir}}/{{.}}{{end}}{{end}}{{end}}`
	list, err := goTool("list", "-deps", "-f", sources, source)
	if err != nil {
		return "", err
	}
	for path := range strings.FieldsSeq(list) {
		info, err := os.Stat(path)
		if err == nil && info.IsDir() {
			_, err = os.ReadDir(path)
		}
		if err != nil {
			return "", err
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	_, err = goTool(append(arguments, source, path)...)
	return path, err
}

// RaceDetector reports whether this test, and so the program, is built with the race detector.
func RaceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

func goTool(arguments ...string) (string, error) {
	output, err := exec.Command("go", arguments...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", arguments[0], err, output)
	}
	return string(output), nil
}

// Process is a running program whose output is kept.
type Process struct {
	command *exec.Cmd
	// Ended is closed when the program has ended.
	Ended chan struct{}
	err   error

	mu   sync.Mutex
	text []byte
	// more is closed and replaced when there is more text, or at the end.
	more chan struct{}
}

// Start starts the command. Await and Output read what it writes, to both outputs unless the
// command has others.
func Start(command *exec.Cmd) (*Process, error) {
	p := &Process{command: command, Ended: make(chan struct{}), more: make(chan struct{})}
	if command.Stdout == nil {
		command.Stdout = p
	}
	if command.Stderr == nil {
		command.Stderr = p
	}
	if err := command.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = command.Wait()
		close(p.Ended)
	}()
	return p, nil
}

// Write implements io.Writer for the program's output.
func (p *Process) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = append(p.text, text...)
	close(p.more)
	p.more = make(chan struct{})
	return len(text), nil
}

// Output returns what the program has written so far.
func (p *Process) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.text)
}

// Await waits until the output matches, and returns the match and its groups as
// regexp.FindStringSubmatch does. It returns os.ErrDeadlineExceeded after Patience, and another
// error if the program ends without a match.
func (p *Process) Await(pattern *regexp.Regexp) ([]string, error) {
	late := time.NewTimer(Patience)
	defer late.Stop()
	for over := false; ; {
		p.mu.Lock()
		text, more := string(p.text), p.more
		p.mu.Unlock()
		if match := pattern.FindStringSubmatch(text); match != nil {
			return match, nil
		}
		if over {
			return nil, fmt.Errorf("the program has ended without having said %s", pattern)
		}
		select {
		case <-more:
		case <-p.Ended:
			over = true
		case <-late.C:
			return nil, fmt.Errorf("the program does not say %s: %w", pattern, os.ErrDeadlineExceeded)
		}
	}
}

var listens = regexp.MustCompile(`msg="http listens" address=(\S+)`)

// Address waits until virgate serves HTTP, and returns the address.
func (p *Process) Address() (string, error) {
	match, err := p.Await(listens)
	if err != nil {
		return "", err
	}
	return match[1], nil
}

// HasEnded reports, without waiting, whether the program has ended.
func (p *Process) HasEnded() bool {
	select {
	case <-p.Ended:
		return true
	default:
		return false
	}
}

// Signal sends the program the signal.
func (p *Process) Signal(signal os.Signal) error { return p.command.Process.Signal(signal) }

// Terminate sends SIGTERM and waits until the program has ended. It returns nil if the exit code is
// 0.
func (p *Process) Terminate() error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("terminate: %w", err)
	}
	late := time.NewTimer(Patience)
	defer late.Stop()
	select {
	case <-p.Ended:
		return p.err
	case <-late.C:
		p.Kill()
		return errors.New("the program ignores SIGTERM")
	}
}

// Kill ends the program if it still runs, and waits until it has ended.
func (p *Process) Kill() {
	_ = p.command.Process.Kill() // It fails if the program has ended already.
	<-p.Ended
}
