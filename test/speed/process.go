package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// patience is how long a condition may take to come true.
const patience = 30 * time.Second

// process is one virgate run.
type process struct {
	command *exec.Cmd
	// began is when it was asked for.
	began time.Time
	// address is where it serves HTTP; known yields it once.
	address string
	known   chan string
	ended   chan struct{}
	err     error
	// said is what it has written so far but for what is being written; only
	// the reader of its output touches it before ended.
	said bytes.Buffer
}

var listening = regexp.MustCompile(`msg="http listens" address=(\S+)`)

// launch starts the program and returns at once.
func launch(ctx context.Context, binary string, arguments ...string) (*process, error) {
	p := &process{
		command: exec.CommandContext(ctx, binary, arguments...),
		known:   make(chan string, 1), ended: make(chan struct{}),
	}
	output, err := p.command.StderrPipe()
	if err != nil {
		return nil, fmt.Errorf("launch virgate: %w", err)
	}
	p.began = time.Now()
	if err := p.command.Start(); err != nil {
		return nil, fmt.Errorf("launch virgate: %w", err)
	}
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(output); lines.Scan(); {
			_, _ = fmt.Fprintln(&p.said, lines.Text())
			if match := listening.FindStringSubmatch(lines.Text()); match != nil {
				p.known <- match[1]
			}
		}
		p.err = p.command.Wait()
	}()
	return p, nil
}

// stop ends the process as its DaemonSet does, and returns when it has ended.
func (p *process) stop() error {
	if err := p.command.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop virgate: %w", err)
	}
	select {
	case <-p.ended:
	case <-time.After(patience):
		_ = p.command.Process.Kill()
		<-p.ended
		return errors.New("virgate does not end")
	}
	if p.err != nil {
		return fmt.Errorf("virgate ended: %w\n%s", p.err, p.said.String())
	}
	return nil
}

// get is what the process answers on a path.
func (p *process) get(path string) (string, error) {
	if p.address == "" {
		select {
		case p.address = <-p.known:
		case <-p.ended:
			return "", fmt.Errorf("virgate ended: %w\n%s", p.err, p.said.String())
		case <-time.After(patience):
			return "", errors.New("virgate does not serve HTTP")
		}
	}
	answer, err := http.Get("http://" + p.address + path)
	if err != nil {
		return "", fmt.Errorf("ask virgate: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", path, answer.Status)
	}
	if err != nil {
		return "", fmt.Errorf("ask virgate: %w", err)
	}
	return string(body), nil
}

// series is a sample of /metrics without labels.
func (p *process) series(name string) (float64, error) {
	text, err := p.get("/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("/metrics has no %s", name)
}
