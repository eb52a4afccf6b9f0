package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/plugin"
)

// claim is the right to serve a device-plugins directory. Of two programs on
// one node the second stands by until the first has ended.
type claim struct {
	dir  string
	log  *slog.Logger
	file *state.File
	lock *state.Lock
}

// acquire waits for the right and takes over what the last program left.
func (c *claim) acquire(ctx context.Context, standBy func()) error {
	lock, err := state.Acquire(ctx, c.dir, func(err error) {
		if !errors.Is(err, state.ErrLocked) {
			c.log.Error("node not claimed, trying again", "error", err)
			return
		}
		c.log.Info("standing by", "because", err)
		standBy()
	})
	if err != nil {
		return err
	}
	c.lock = lock
	c.file.Load()
	if err := plugin.RemoveSockets(c.dir); err != nil {
		c.log.Warn("old sockets not removed", "error", err)
	}
	c.log.Info("serving this node", "dir", c.dir)
	return nil
}

func (c *claim) release() {
	if c.lock == nil {
		return
	}
	if err := c.lock.Release(); err != nil {
		c.log.Warn("lock not released", "error", err)
	}
}
