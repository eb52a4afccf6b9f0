package nvml

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/sharing"
)

// poller is the part of a Node that calls the driver. It opens the driver, reads the GPUs at
// intervals, listens for events, and sends what it finds to the publisher.
type poller struct {
	*Node
	// lib is the Node's library, with calls that end soon after Watch does.
	lib      Library
	scans    chan scanResult
	events   chan receivedEvent
	monitors chan map[string]string
	// rescanNow has room for one request for an early scan.
	rescanNow      wake.Signal
	loggedProblems string
	// loggedKernel is the last error of the Kernel.
	loggedKernel string
	// opening gets the result of opening the control node, which may hang; nil if it is not being
	// opened.
	opening chan error
	// hadGPUs is true once GPUs have been read. firstScan is when; hadAll is true once all were, or
	// are no longer waited for. unlisted is true if the driver did not list all GPUs.
	hadGPUs   bool
	firstScan time.Time
	hadAll    bool
	unlisted  bool
	// lost holds the GPUs that were lost and have not been read since. Like awaitingScan, it
	// outlives a session with the driver.
	lost map[string]bool
	// lostPasses counts, for each GPU that is lost now, the consecutive passes in which it was
	// lost; the key "" stands for unknown GPUs. reopened is when the driver was last reopened for a
	// lost GPU. Both outlive a session with the driver.
	lostPasses map[string]int
	reopened   time.Time
	// watchedUntil is when the last session ended that has read GPUs; zero while one watches them.
	watchedUntil time.Time
	// mustOpen is true while the driver has not been opened yet and a failure ends the program.
	mustOpen bool
	// awaitingScan holds the commands that wait for the next successful scan.
	awaitingScan []chan struct{}
}

func newPoller(n *Node, lib Library) *poller {
	return &poller{
		Node:      n,
		lib:       lib,
		scans:     make(chan scanResult),
		events:    make(chan receivedEvent),
		monitors:  make(chan map[string]string),
		rescanNow: wake.NewSignal(),
		lost:      map[string]bool{},
		mustOpen:  n.options.FailOnInitError,
	}
}

// rescanSoon requests an early scan. It never blocks.
func (p *poller) rescanSoon() {
	p.rescanNow.Notify()
}

// backoff returns the pauses between attempts.
func (n *Node) backoff() wait.Backoff {
	return wake.Backoff(n.options.Backoff, 30*time.Second)
}

// run opens the driver, and reopens it after failures, until ctx ends.
func (p *poller) run(ctx context.Context) error {
	retry := p.backoff()
	var mismatches Mismatches
	for {
		if waited := p.gate.awaitOpen(ctx); waited { // Another program had the driver, and may not have it ready yet.
			p.mustOpen, mismatches = false, Mismatches{}
		}
		worked, err := p.session(ctx)
		if worked {
			retry = p.backoff()
		}
		if _, released := errors.AsType[*releasedError](err); released && ctx.Err() == nil {
			continue // The driver was closed just before.
		}
		left, lasting := mismatches.Lasting(err)
		mayLackNodes := p.hadGPUs || errors.Is(err, DriverNotLoaded) && p.loaded()
		if mayLackNodes && err != nil && !errors.Is(err, errNoNodes) && ctx.Err() == nil {
			if lost := p.nodesLost(ctx); lost != nil {
				err = fmt.Errorf("%w: %w", lost, err)
			}
		}
		switch {
		case errors.Is(err, errNoNodes) && ctx.Err() == nil:
			return err
		case p.mustOpen && ctx.Err() == nil:
			return fmt.Errorf("%w (with --fail-on-init-error=false it is waited for)", err)
		case lasting != nil && ctx.Err() == nil:
			return lasting
		case err == nil && ctx.Err() == nil:
			continue // The gate asked for a new session.
		case ctx.Err() != nil || !send(ctx, p.scans, scanResult{err: err}):
			return nil
		}
		pause := retry.Step()
		if left > 0 {
			pause = min(pause, left)
		}
		if !wake.Sleep(ctx, pause) {
			return nil
		}
	}
}

// session opens the driver and reads the GPUs until that fails or ctx ends. worked reports whether
// they were read at least once.
func (p *poller) session(ctx context.Context) (worked bool, err error) {
	if err := p.lib.Init(); err != nil {
		return false, fmt.Errorf("open the driver: %w", explainMismatch(err))
	}
	p.mustOpen = false
	defer func() {
		if err := p.lib.Shutdown(); err != nil && !errors.Is(err, context.Canceled) {
			p.log.Warn("the driver could not be closed", "error", err)
		}
	}()
	gpus := newScanner(p.lib, p.lost)
	defer gpus.reads.Wait()
	// This runs after the wait for events has ended, because a GPU may be reset during that wait.
	defer gpus.lastProbe(ctx)
	listening := newListener(p)
	defer listening.stop(ctx)
	defer func() {
		if worked {
			p.watchedUntil = time.Now()
		}
	}()
	versions := ReadVersions(p.lib)
	var scannedAt time.Time
	for {
		var scanned scanResult
		// Half an interval too early is better than almost a whole interval too late.
		if now := time.Now(); now.Sub(scannedAt) >= p.options.Rescan-p.options.Probe/2 {
			scannedAt, scanned = now, gpus.scan(ctx)
			p.compare(&scanned, len(gpus.indices))
		} else {
			scanned = gpus.probe(ctx)
		}
		if scanned.err != nil {
			return worked, scanned.err
		}
		if scanned.nothingWorks() {
			if lost := p.nodesLost(ctx); lost != nil {
				return worked, fmt.Errorf("no GPU can be read: %w", lost)
			}
		}
		worked = true
		scanned.driver = versions.Driver
		scanned.versions = versions
		scanned.unwatchedSince = p.watchedUntil
		p.watchedUntil = time.Time{}
		p.reopenForLost(scanned)
		p.logProblems(scanned.problems)
		if !p.deliver(ctx, scanned, listening) {
			return worked, nil
		}
		for _, waiting := range p.awaitingScan {
			close(waiting)
		}
		p.awaitingScan = nil
		if !p.hadGPUs {
			p.hadGPUs = true
			p.firstScan = time.Now()
		}
		if scanned.compared {
			p.unlisted = len(scanned.bound) > scanned.listed
		}
		p.endFirstRead(gpus)
		for next := time.After(p.interval()); next != nil; {
			select {
			case <-ctx.Done():
				return worked, nil
			case <-next:
				next = nil
			case <-p.rescanNow:
				scannedAt, next = time.Time{}, nil
			case c := <-p.commands:
				if c.do != nil {
					c.do(listening)
					close(c.done)
				} else {
					p.awaitingScan = append(p.awaitingScan, c.done)
				}
				scannedAt, next = time.Time{}, nil
			case r := <-gpus.results:
				if !p.deliver(ctx, gpus.late(r), listening) {
					return worked, nil
				}
				p.endFirstRead(gpus)
			case <-listening.retry:
				listening.retry, next = nil, nil
			case <-p.gate.reopen:
				clear(listening.degraded) // The next session has events again at once.
				return worked, nil
			case err := <-listening.ended:
				listening.handleFailure(ctx, err)
				scannedAt, next = time.Time{}, nil
			}
		}
	}
}

// firstReadLimit is how long after the first scan GPUs that do not answer are waited for, before the
// driver is closed for a GPU that the last run released.
const firstReadLimit = time.Minute

// endFirstRead gives up the session that reads all GPUs at the start, although one is released, when
// they have been read.
func (p *poller) endFirstRead(gpus *scanner) {
	if p.hadAll || time.Since(p.firstScan) < firstReadLimit && (p.unlisted || !gpus.answered()) {
		return
	}
	p.hadAll = true
	p.gate.countMustRead(-1)
}

// interval is the time between two passes over the GPUs.
func (p *poller) interval() time.Duration { return min(p.options.Rescan, p.options.Probe) }

// A GPU that is lost in passesUntilLost passes stays lost in this session with the driver: nvml.h
// does not say whether a session gets a lost GPU back. A new session misses events of all GPUs for
// a moment, so there is at most one in passesUntilReopen passes: once a minute, unless the program
// is configured to read the GPUs more often.
const (
	passesUntilLost   = 3
	passesUntilReopen = 6
)

// reopenForLost requests a new session when a GPU stays lost. It does not while a call hangs,
// because the session would not end.
func (p *poller) reopenForLost(scanned scanResult) {
	before := p.lostPasses
	p.lostPasses = map[string]int{}
	stays, first := false, false
	count := func(gpu string) {
		p.lostPasses[gpu] = before[gpu] + 1
		stays = stays || p.lostPasses[gpu] >= passesUntilLost
		first = first || p.lostPasses[gpu] == passesUntilLost
	}
	for gpu, why := range scanned.unreadable {
		if why.cause == sharing.CauseLost {
			count(gpu)
		}
	}
	if scanned.lostThere {
		count("")
	}
	if !stays || time.Since(p.reopened) < passesUntilReopen*p.interval() || deadlinesOf(p.Node.lib).hung() != "" {
		return
	}
	if first {
		p.log.Info("a GPU stays lost: the driver is opened again now and then, which may find it")
	}
	p.reopened = time.Now()
	p.gate.closeAll()
}

// deliver sends a scan to the publisher, which must know the handles before events name them. Then
// it registers the GPUs for events.
func (p *poller) deliver(ctx context.Context, scanned scanResult, listening *listener) bool {
	if !send(ctx, p.scans, scanned) {
		return false
	}
	listening.register(ctx, scanned.readings)
	return true
}

func (p *poller) logProblems(problems error) {
	if text := message(problems); text != p.loggedProblems {
		p.loggedProblems = text
		if problems != nil {
			p.log.Warn("not every GPU could be read", "error", problems)
		}
	}
}

func send[T any](ctx context.Context, to chan<- T, value T) bool {
	select {
	case to <- value:
		return true
	case <-ctx.Done():
		return false
	}
}
