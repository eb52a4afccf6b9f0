package soak

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

// world is what a schedule is played on.
type world struct {
	t       *testing.T
	ctx     context.Context
	site    site
	kubelet *simkubelet.Kubelet
	cluster *cluster
	witness *witness
	pods    *pods
	program *program
	// runs counts the programs that were started.
	runs  int
	uuids []string
	// scripts end the driver's troubles.
	scripts []func()
	// missed are the boards that may have had a fatal error and were not seen in
	// use since, with whether a reset of theirs may go unseen.
	missed map[int]bool
	// reopens says that the program may give up all handles at any time, because
	// the boards cannot be listed now and then.
	reopens bool
	// settled is what the last settle left.
	settled *judgement
	// streams is what was counted at the last calm operation on streams.
	streams map[string][2]int
	figures figures
	// patience is how long the node may take to come to rest. What is slow are the
	// program's own pauses, up to 6 s after an API server was away twice, 5 s and
	// more after the driver has refused to cut a board; and a machine that does a
	// lot else.
	patience time.Duration
}

// figures are for the report.
type figures struct {
	kinds       map[kind]int
	slowestStop time.Duration
	slowestRest time.Duration
	reconnected time.Duration
	stops       int
}

func newWorld(t *testing.T, ctx context.Context, log *slog.Logger) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "vs") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	node, err := simnode.Load("soak.yaml", []byte(nodeYAML))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, ctx: ctx, witness: newWitness(node.Boards), figures: figures{kinds: map[kind]int{}}, missed: map[int]bool{}}
	for _, board := range node.Boards() {
		w.uuids = append(w.uuids, board.UUID)
	}
	w.site = site{
		dir: filepath.Join(dir, "dp"), podResources: filepath.Join(dir, "pr.sock"), root: filepath.Join(dir, "host"),
		node: node, log: log,
	}
	if err := os.MkdirAll(w.site.root, 0o750); err != nil {
		t.Fatal(err)
	}
	w.cluster, w.site.kubeconfig = newCluster(t, dir)
	w.kubelet = simkubelet.New(simkubelet.Options{
		Dir: w.site.dir, PodResourcesSocket: w.site.podResources, HoldPods: true, AllowOverlap: true, Witness: w.witness.take, Logger: log,
	})
	w.pods = newPods(w.kubelet)

	running, stop := context.WithCancel(context.Background())
	var children sync.WaitGroup
	children.Go(func() { _ = w.kubelet.Run(running) })
	children.Go(func() { w.pods.run(running) })
	t.Cleanup(func() {
		stop()
		close(w.pods.queue)
		children.Wait()
	})
	if w.program, err = w.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = w.program.stop() })
	return w
}

// wrong is everything that anybody complains of.
func (w *world) wrong() []string {
	return slices.Concat(w.witness.check(), w.pods.check(), w.kubelet.Violations())
}

// boardAt is the driver's index of the board; -1 for one that was pulled.
func (w *world) boardAt(ordinal int) (index int, board simnode.Board) {
	board = w.site.node.Boards()[ordinal]
	return board.Index, board
}

// await waits until nothing is missing; the error tells what is.
func (w *world) await(what string, missing func() string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	patient := time.NewTimer(w.patience)
	defer patient.Stop()
	for {
		reason := missing()
		if reason == "" {
			return nil
		}
		if wrong := w.wrong(); len(wrong) > 0 {
			return fmt.Errorf("%s: %s", what, strings.Join(wrong, "\n"))
		}
		select {
		case <-tick.C:
		case <-patient.C:
			return fmt.Errorf("%s: not in %s: %s", what, w.patience, reason)
		case <-w.ctx.Done():
			return fmt.Errorf("%s: %w: %s", what, w.ctx.Err(), reason)
		}
	}
}

// steady is how long all must have been as it should be: longer than what is
// under way can take to show.
const steady = 4 * rescan

// rest waits until all is as it should be, and stays so.
func (w *world) rest(o operation) error {
	began := time.Now()
	var since time.Time
	var lists int
	healed, pause := time.Now(), 10*time.Second
	err := w.await(o.String(), func() string {
		if missing := w.program.seen.missing(*o.wish); missing != "" && !o.rejected {
			since = time.Time{}
			return missing
		}
		if underway := w.underway(); underway != "" {
			since = time.Time{}
			return underway
		}
		now := judge(rest{*o.wish, o.conditions, w.site.node.Boards(), w.kubelet.Snapshot()})
		if len(now.wrong) > 0 {
			since = time.Time{}
			if time.Since(healed) > pause {
				w.resetAgain(o.conditions)
				healed, pause = time.Now(), 2*pause
			}
			return strings.Join(now.wrong, "\n")
		}
		if received := w.witness.tally().lists; since.IsZero() || received != lists {
			since, lists = time.Now(), received
		}
		w.settled = now
		if time.Since(since) < steady {
			return "it does not last"
		}
		return ""
	})
	if err == nil {
		w.recovered()
	}
	w.figures.slowestRest = max(w.figures.slowestRest, time.Since(began))
	return err
}

// underway says that a board is in the middle of being cut, which a profile
// without a layout lets come to its end; empty when none is.
func (w *world) underway() string {
	data, err := os.ReadFile(filepath.Join(w.site.dir, "virgate_state.json"))
	if err != nil {
		return err.Error()
	}
	var file struct {
		Sections struct {
			Journal struct {
				Underway []struct{ GPU string }
			}
		}
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return err.Error()
	}
	for ordinal, board := range w.site.node.Boards() {
		for _, change := range file.Sections.Journal.Underway {
			if change.GPU == board.UUID && board.Index >= 0 && !board.Lost {
				return fmt.Sprintf("board %d is being cut", ordinal)
			}
		}
	}
	return ""
}

// stop ends the program and looks for what it has left.
func (w *world) stop() error {
	took, err := w.program.stop()
	w.figures.stops++
	w.figures.slowestStop = max(w.figures.slowestStop, took)
	if err != nil {
		return err
	}
	return leaked()
}

func (w *world) restart() error {
	if err := w.stop(); err != nil {
		return err
	}
	next, err := w.start()
	w.program = next
	return err
}

// succeed starts a second program, which waits, and ends the first.
func (w *world) succeed() error {
	next, err := w.start()
	if err != nil {
		return err
	}
	took, err := w.program.stop()
	w.figures.stops++
	w.figures.slowestStop = max(w.figures.slowestStop, took)
	w.program = next
	return err
}
