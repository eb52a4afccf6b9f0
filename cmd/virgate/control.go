package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/simnode"
)

// listenControl listens on a Unix socket that only its owner can use. The
// socket of a program that is gone is replaced, that of a living one is not.
func listenControl(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if connection, err := net.Dial("unix", path); err == nil {
		_ = connection.Close()
		return nil, fmt.Errorf("control socket %s: another program listens there", path)
	} else if !errors.Is(err, os.ErrNotExist) {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("control socket: %w", err)
		}
	}
	// The mode is set before the file exists: nobody else can ever connect.
	config := net.ListenConfig{Control: func(_, _ string, socket syscall.RawConn) error {
		var failed error
		err := socket.Control(func(fd uintptr) { failed = syscall.Fchmod(int(fd), 0o600) })
		return errors.Join(err, failed)
	}}
	listener, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return listener, nil
}

// controlHandler is what a running program can be told and asked on its control
// socket: health, and faults where the node is simulated.
func controlHandler(health agent.Health, simulated *simnode.Node) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/health", agent.HealthHandler(health))
	mux.Handle("/health/", agent.HealthHandler(health))
	if simulated != nil {
		mux.Handle("/sim/", simulated.Handler())
	}
	return mux
}
