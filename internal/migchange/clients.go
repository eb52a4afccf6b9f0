package migchange

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/mig"
)

// ClientLabels are this Node's labels by which the GPU Operator runs programs that keep GPUs open
// and are in no list of the driver, such as DCGM.
type ClientLabels interface {
	// Running returns the labels of the programs that run; none while unknown, or if another
	// program makes the MIG layouts.
	Running() []string
	// Pause ends the programs of these labels, and Resume starts them again. Neither changes a
	// label with an unexpected value. After an error, any of the labels may have been changed.
	Pause(ctx context.Context, labels []string) error
	Resume(ctx context.Context, labels []string) error
}

// clients pauses these programs for changes, and resumes them when no change is under way. The
// journal records which are paused. Any goroutine may call its methods; only one may call run.
type clients struct {
	*Options
	journal *keeper
	// wake has room for one request to resume them.
	wake wake.Signal

	// mu is also held while labels are written.
	mu      sync.Mutex
	changes int
}

// begin and end enclose a change.
func (c *clients) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes++
}

func (c *clients) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changes--
	c.wake.Notify()
}

// pause returns the paused labels; none if pausing is not allowed or has failed.
func (c *clients) pause(ctx context.Context) []string {
	if !c.PauseClients || c.Clients == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	labels := c.journal.current().PausedClients
	if len(labels) == 0 {
		labels = c.Clients.Running()
		if len(labels) == 0 {
			return nil
		}
		err = c.journal.save(func(j Journal) Journal { j.PausedClients = labels; return j })
	}
	if err == nil { // The journal also has labels whose pause has failed.
		err = c.Clients.Pause(ctx, labels)
	}
	if err != nil {
		c.Logger.Warn("programs that have GPUs open not paused for a MIG change", "labels", labels, "error", err)
		return nil
	}
	c.Logger.Info("programs that have GPUs open are paused for a MIG change", "labels", labels)
	return labels
}

// resume starts the programs again, unless a change is under way.
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

// lastTry limits the wait for the API server when the program ends.
const lastTry = 2 * time.Second

// run calls resume after each change until ctx ends, and retries it if it fails. It also calls it
// at the start, since the last run may have been killed.
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

// leave calls resume when the program ends, which interrupts a change.
func (c *clients) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTry)
	defer cancel()
	if err := c.resume(ctx); err != nil {
		c.Logger.Error("labels by which programs are paused for a MIG change left to the next run", "labels",
			c.journal.current().PausedClients, "error", err)
	}
}

// clientTries and clientPause are how often, and at what interval, a step is repeated while paused
// programs end. A pod may need 30 s to end, and a DaemonSet's pod is deleted only after its
// controller has seen the label.
const (
	clientTries = 45
	clientPause = 2 * time.Second
)

// vainPause is a pause of programs that did not help. They are not paused again while the GPU has
// that layout and the programs left then still have it open.
type vainPause struct {
	// text names the paused programs, and how long the pause lasted.
	text   string
	layout mig.PlacedLayout
	left   []string
}

// stillTrue reports whether nothing has changed that may let a pause help. err is why the step
// failed now.
func (v *vainPause) stillTrue(layout mig.PlacedLayout, err error) bool {
	if v == nil || !reflect.DeepEqual(v.layout, layout) {
		return false
	}
	now := programsIn(err)
	return !slices.ContainsFunc(v.left, func(program string) bool { return !slices.Contains(now, program) })
}

func programsIn(err error) []string {
	if unlisted, ok := errors.AsType[*mig.UnlistedClientError](err); ok {
		return unlisted.Programs
	}
	return nil
}

// makeWithoutClients pauses the programs that the driver does not list and repeats the step, which
// failed with err because of them.
func (e *executor) makeWithoutClients(
	ctx context.Context,
	g *managedGPU,
	layout mig.PlacedLayout,
	step mig.Step,
	err error,
) error {
	if g.inVain.stillTrue(layout, err) {
		return fmt.Errorf("%w; it did not help to pause %s", err, g.inVain.text)
	}
	labels := strings.Join(e.clients.pause(ctx), " and ")
	if labels == "" {
		return err
	}
	e.progress.report(g, nodereport.LayoutPending,
		fmt.Sprintf("waiting for the programs of the label %s to let go of the GPU", labels))
	for range clientTries {
		if !wake.Sleep(ctx, clientPause) {
			return err
		}
		err = e.Partitioner.Apply(ctx, g.status.GPU, step)
		if !errors.Is(err, mig.ErrUnlistedClient) {
			return e.logStep(g.status.GPU, step, err)
		}
	}
	g.inVain = &vainPause{
		text:   fmt.Sprintf("%s for %s", labels, clientTries*clientPause),
		layout: layout,
		left:   programsIn(err),
	}
	return e.logStep(g.status.GPU, step, fmt.Errorf("%w; it did not help to pause %s", err, g.inVain.text))
}
