package migchange

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/mig"
)

// ClientLabels are the labels of this Node by which the GPU Operator runs programs that have GPUs open
// and are in no list of the driver, such as DCGM.
type ClientLabels interface {
	// Running are the labels of those that run; none while that is not known, or another program makes the MIG layouts.
	Running() []string
	// Pause ends the programs of these labels, and Resume has them run again. Both leave a label alone
	// that is not as they expect it. After an error any of the labels may have been changed.
	Pause(ctx context.Context, labels []string) error
	Resume(ctx context.Context, labels []string) error
}

// clients pauses these programs for changes, and has them run again when no change is under way. What
// is paused is in the journal. Any goroutine may call its methods, one of them run.
type clients struct {
	*Options
	journal *keeper
	// wake has room for one request to have them run again.
	wake chan struct{}

	// mu is held while labels are written, too.
	mu      sync.Mutex
	changes int
}

// begin and end stand around a change.
func (c *clients) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes++
}

func (c *clients) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes--
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// pause returns the labels that are paused; none where that is not allowed, or failed.
func (c *clients) pause(ctx context.Context) []string {
	if !c.PauseClients || c.Clients == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if paused := c.journal.current().PausedClients; len(paused) > 0 {
		return paused
	}
	labels := c.Clients.Running()
	if len(labels) == 0 {
		return nil
	}
	err := c.journal.save(func(j Journal) Journal { j.PausedClients = labels; return j })
	if err == nil {
		err = c.Clients.Pause(ctx, labels)
	}
	if err != nil {
		c.Logger.Warn("programs that have GPUs open not paused for a MIG change", "labels", labels, "error", err)
		return nil
	}
	c.Logger.Info("programs that have GPUs open are paused for a MIG change", "labels", labels)
	return labels
}

// resume has the programs run again, unless a change is under way.
func (c *clients) resume(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	labels := c.journal.current().PausedClients
	if c.changes > 0 || len(labels) == 0 || c.Clients == nil {
		return nil
	}
	if err := c.Clients.Resume(ctx, labels); err != nil {
		return err
	}
	c.Logger.Info("programs that were paused for a MIG change run again", "labels", labels)
	return c.journal.save(func(j Journal) Journal { j.PausedClients = nil; return j })
}

// lastTry is how long the end of the program waits for an API server.
const lastTry = 2 * time.Second

// run calls resume when a change has ended, and at the start, since the last run may have been killed, until ctx ends.
// While that fails it is tried again.
func (c *clients) run(ctx context.Context) {
	c.journal.load()
	failures, logged := 0, ""
	for ctx.Err() == nil {
		var later <-chan time.Time
		if err := c.resume(ctx); err == nil {
			failures, logged = 0, ""
		} else {
			failures++
			later = time.After(retryAfter(failures, longestRetry))
			if err.Error() != logged {
				logged = err.Error()
				c.Logger.Error("labels by which programs are paused for a MIG change not taken back, trying again",
					"labels", c.journal.current().PausedClients, "error", err)
			}
		}
		select {
		case <-c.wake:
		case <-later:
		case <-ctx.Done():
		}
	}
}

// leave is resume at the end of the program, which interrupts a change.
func (c *clients) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTry)
	defer cancel()
	if err := c.resume(ctx); err != nil {
		c.Logger.Error("labels by which programs are paused for a MIG change left to the next run", "labels",
			c.journal.current().PausedClients, "error", err)
	}
}

// How often a step is tried again while paused programs end, and with which pause: a pod may take 30 s
// to end, and that of a DaemonSet is deleted when its controller has seen the label.
const (
	clientTries = 45
	clientPause = 2 * time.Second
)

// makeWithoutClients makes the step again when programs that are in no list of the driver have been
// paused, in whose way it failed with err.
func (e *executor) makeWithoutClients(ctx context.Context, g *managedGPU, step mig.Step, err error) error {
	if g.pausedInVain != "" {
		return fmt.Errorf("%w; it did not help to pause %s", err, g.pausedInVain)
	}
	labels := strings.Join(e.clients.pause(ctx), " and ")
	if labels == "" {
		return err
	}
	e.progress.report(g, nodereport.LayoutPending,
		fmt.Sprintf("waiting for the programs of the label %s to let go of the GPU", labels))
	for range clientTries {
		select {
		case <-time.After(clientPause):
		case <-ctx.Done():
			return err
		}
		err = e.Partitioner.Apply(ctx, g.status.GPU, step)
		if !errors.Is(err, mig.ErrUnlistedClient) {
			return e.logStep(g.status.GPU, step, err)
		}
	}
	g.pausedInVain = fmt.Sprintf("%s for %s", labels, clientTries*clientPause)
	return e.logStep(g.status.GPU, step, fmt.Errorf("%w; it did not help to pause %s", err, g.pausedInVain))
}
