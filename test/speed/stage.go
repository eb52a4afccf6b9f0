package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/virgate/virgate/internal/simkubelet"
)

// resource is what the simulated node offers.
const resource = "nvidia.com/gpu"

// boards is how many the simulated node has.
const boards = 8

// stage is a simulated kubelet in this process and a folder that a virgate
// process shares with it.
type stage struct {
	binary  string
	dir     string
	kubelet *simkubelet.Kubelet
	// lists has how many devices the last list let the kubelet give, until
	// somebody takes it.
	lists chan int
	stop  func()
}

// newStage starts the kubelet.
func newStage(ctx context.Context, binary string) (*stage, error) {
	dir, err := os.MkdirTemp("", "vs") // A socket's path must be short.
	if err != nil {
		return nil, fmt.Errorf("set the stage: %w", err)
	}
	s := &stage{binary: binary, dir: dir, lists: make(chan int, 1)}
	s.kubelet = simkubelet.New(simkubelet.Options{Dir: s.plugins(), PodResourcesSocket: s.path("pr.sock"), Witness: s.witness})
	if err := s.kubelet.Start(ctx); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	serving, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = s.kubelet.Run(serving) })
	s.stop = func() {
		stop()
		running.Wait()
		_ = os.RemoveAll(dir)
	}
	return s, nil
}

// unpack has a copy of the program run that is written in small pieces, as an image
// is unpacked on a node: Linux maps a file in the pieces in which it was written.
func (s *stage) unpack() error {
	from, err := os.Open(s.binary)
	if err != nil {
		return fmt.Errorf("copy the program: %w", err)
	}
	defer func() { _ = from.Close() }()
	s.binary = s.path("virgate")
	to, err := os.OpenFile(s.binary, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o700)
	if err != nil {
		return fmt.Errorf("copy the program: %w", err)
	}
	_, err = io.Copy(struct{ io.Writer }{to}, struct{ io.Reader }{from})
	if err := errors.Join(err, to.Close()); err != nil {
		return fmt.Errorf("copy the program: %w", err)
	}
	return nil
}

func (s *stage) path(name string) string { return filepath.Join(s.dir, name) }
func (s *stage) plugins() string         { return s.path("dp") }

// share makes the profile one that has so many devices in all.
func (s *stage) share(devices int) error {
	next := s.path("next.yaml")
	if err := os.WriteFile(next, profile(devices), 0o600); err != nil {
		return fmt.Errorf("write the profile: %w", err)
	}
	if err := os.Rename(next, s.path("profile.yaml")); err != nil {
		return fmt.Errorf("write the profile: %w", err)
	}
	return nil
}

// profile has so many devices on all boards together.
func profile(devices int) []byte {
	return fmt.Appendf(nil, "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: %s, replicas: %d}\n", resource, devices/boards)
}

// run starts virgate, with the profile of share and more flags.
func (s *stage) run(ctx context.Context, more ...string) (*process, error) {
	return launch(ctx, s.binary, append([]string{
		"run", "--node", "sim:dgx-a100", "--device-plugin-dir", s.plugins(), "--pod-resources-socket", s.path("pr.sock"),
		"--control-socket", s.path("control.sock"), "--listen", "127.0.0.1:0",
	}, more...)...)
}

// configured is the flag for the profile of share.
func (s *stage) configured() []string { return []string{"--config", s.path("profile.yaml")} }

// witness keeps what the newest list says.
func (s *stage) witness(event simkubelet.Event) {
	if event.Kind != simkubelet.Listed {
		return
	}
	healthy := 0
	for _, d := range event.Devices {
		if d.Healthy {
			healthy++
		}
	}
	select {
	case <-s.lists: // Nobody has taken the one before.
	default:
	}
	s.lists <- healthy
}

// shows waits until a list arrives with which the kubelet can give so many
// devices. What the simulated kubelet does with it afterwards, its checks and
// its checkpoint, is nobody's time.
func (s *stage) shows(ctx context.Context, allocatable int) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	last := -1
	for last != allocatable {
		select {
		case last = <-s.lists:
		case <-ctx.Done():
			return fmt.Errorf("await a list of %d devices, the last has %d: %w", allocatable, last, ctx.Err())
		}
	}
	return nil
}

// forget removes what a virgate that has ended left in the folder.
func (s *stage) forget(ctx context.Context) error {
	if err := s.kubelet.Stop(ctx); err != nil {
		return err
	}
	if err := os.RemoveAll(s.plugins()); err != nil {
		return fmt.Errorf("clear the stage: %w", err)
	}
	return s.kubelet.Start(ctx)
}
