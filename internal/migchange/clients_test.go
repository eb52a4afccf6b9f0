package migchange

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

const dcgmLabel, exporterLabel = "nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter"

// operator plays the GPU Operator: its DCGM, the program of the world client, ends a moment after its label is
// paused, and returns at once.
type operator struct {
	sim *simnode.Node

	mu     sync.Mutex
	labels map[string]string
	// takes is how long DCGM takes to end, 0 for forever.
	takes time.Duration
	// pauses and resumes count calls; the next fails calls of either fail.
	pauses, resumes, fails int
}

func newOperator(sim *simnode.Node) *operator {
	return &operator{sim: sim, labels: map[string]string{dcgmLabel: "true", exporterLabel: "true"}, takes: 5 * time.Second}
}

func (o *operator) Running() (labels []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for label, value := range o.labels {
		if value == "true" {
			labels = append(labels, label)
		}
	}
	slices.Sort(labels)
	return labels
}

func (o *operator) Pause(_ context.Context, labels []string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pauses++
	o.change(labels, "true", "paused")
	if o.takes > 0 {
		time.AfterFunc(o.takes, o.settle)
	}
	return o.failure()
}

func (o *operator) Resume(_ context.Context, labels []string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.resumes++
	if err := o.failure(); err != nil {
		return err
	}
	o.change(labels, "paused", "true")
	o.sim.SetClient(o.labels[dcgmLabel] == "true")
	return nil
}

func (o *operator) change(labels []string, from, to string) {
	for _, label := range labels {
		if o.labels[label] == from {
			o.labels[label] = to
		}
	}
}

func (o *operator) failure() error {
	if o.fails > 0 {
		o.fails--
		return errors.New("the API server is away")
	}
	return nil
}

func (o *operator) settle() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.labels[dcgmLabel] == "paused" {
		o.sim.SetClient(false)
	}
}

func (o *operator) told() (pauses, resumes int, all string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.pauses, o.resumes, o.labels[dcgmLabel] + " " + o.labels[exporterLabel]
}

// start runs the program until stop is called.
func (w *world) start(o *operator, pause bool, layout string) (r *Reconciler, stop func()) {
	r = w.program()
	r.Clients, r.PauseClients, r.now = o, pause, time.Now
	r.Inputs = func() ([]sharing.GPU, sharing.MIGConfig, error) {
		gpus, err := nvml.Scan(w.sim)
		return gpus, layoutNamed(layout), err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	return r, func() { cancel(); <-done }
}

func wait(d time.Duration) {
	<-time.After(d) //nolint:forbidigo // in a synctest bubble: the time is simulated
	synctest.Wait()
}

// states lists the states of all GPUs, sorted, without duplicates.
func states(r *Reconciler) string {
	var list []string
	for _, gpu := range r.Status() {
		list = append(list, string(gpu.State))
	}
	slices.Sort(list)
	return strings.Join(slices.Compact(list), " ")
}

// TestPauseClients checks that, where allowed, an unlisted program that has GPUs open is paused for a change and
// resumed afterwards.
func TestPauseClients(t *testing.T) {
	for _, test := range []struct {
		name, node, layout string
		prepare            func(*operator)
		forbidden          bool
		state              string
		// pauses is the most pauses allowed; if it is not 0, there must be at least one.
		pauses int
	}{
		{"another mode", "a100-40x3", "all-balanced", func(*operator) {}, false, "applied", 3},
		{"other partitions", "h100x2+all-1g.10gb", "all-3g.40gb", func(*operator) {}, false, "applied", 2},
		{"it takes a minute to end", "h100", "all-balanced", func(o *operator) { o.takes = time.Minute }, false, "applied", 1},
		{"it does not end", "a100-40x3", "all-balanced", func(o *operator) { o.takes = 0 }, false, "blocked", 3},
		{"not allowed", "a100-40", "all-balanced", func(*operator) {}, true, "blocked", 0},
		{"another program makes the layouts", "a100-40", "all-balanced", func(o *operator) { clear(o.labels) }, false, "blocked", 0},
		{"the exporter is not the operator's", "a100-40", "all-balanced", func(o *operator) { o.labels[exporterLabel] = "" }, false, "applied", 1},
		{"the API server is away at first", "a100-40", "all-balanced", func(o *operator) { o.fails = 3 }, false, "applied", 5},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorldIn(t, test.node, "client=dcgm")
				o := newOperator(w.sim)
				test.prepare(o)
				_, _, before := o.told()
				r, stop := w.start(o, !test.forbidden, test.layout)
				defer stop()
				wait(10 * time.Minute)
				pauses, _, now := o.told()
				if got := states(r); got != test.state {
					t.Errorf("the GPUs are %s, want %s: %+v", got, test.state, r.Status())
				}
				if now != before || len(w.journal().PausedClients) > 0 {
					t.Errorf("labels %s, before %s, journal %q", now, before, w.journal().PausedClients)
				}
				if pauses > test.pauses || (pauses == 0) != (test.pauses == 0) {
					t.Errorf("%d pauses, want at most %d", pauses, test.pauses)
				}
				if test.state == "blocked" {
					wait(time.Hour)
				}
				if later, _, _ := o.told(); later > test.pauses || later > pauses && test.state == "applied" {
					t.Errorf("%d pauses, and %d later", pauses, later)
				}
			})
		})
	}
}

// TestPausedClientsInStatus checks that while a paused program ends, the status shows that the GPU waits for it.
func TestPausedClientsInStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorldIn(t, "h100", "client=dcgm")
		o := newOperator(w.sim)
		o.takes = 0
		r, stop := w.start(o, true, "all-balanced")
		defer stop()
		wait(time.Second)
		want := "waiting for the programs of the label " + dcgmLabel + " and " + exporterLabel + " to let go of the GPU"
		if got := r.Status()[0]; got.State != nodereport.LayoutPending || got.Reason != want {
			t.Errorf("meanwhile: %s (%s)", got.State, got.Reason)
		}
		wait(2 * time.Minute)
		if got := r.Status()[0]; got.State != nodereport.LayoutBlocked || !strings.Contains(got.Reason, "in no list of the driver") || !strings.Contains(got.Reason, "it did not help to pause "+dcgmLabel) {
			t.Errorf("in the end: %s (%s)", got.State, got.Reason)
		}
	})
}

// TestPausedClientsOfAnEarlierRun checks that programs paused by a run that ended or was killed are resumed, even
// if the next run may not pause any.
func TestPausedClientsOfAnEarlierRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorldIn(t, "h100", "client=dcgm")
		o := newOperator(w.sim)
		o.takes = 0
		_, stop := w.start(o, true, "all-balanced")
		wait(time.Second)
		killed := w.journal()
		if _, _, now := o.told(); now != "paused paused" || !slices.Equal(killed.PausedClients, []string{dcgmLabel, exporterLabel}) {
			t.Fatalf("labels %s, journal %+v", now, killed)
		}
		stop()
		if _, _, now := o.told(); now != "true true" || len(w.journal().PausedClients) > 0 {
			t.Errorf("after the end: labels %s, journal %q", now, w.journal().PausedClients)
		}
		// As after SIGKILL; meanwhile another program has paused the exporter.
		w.kept, o.labels, o.fails = killed, map[string]string{dcgmLabel: "paused", exporterLabel: "paused-for-driver-upgrade"}, 5
		log := &strings.Builder{}
		r := w.program()
		r.Logger = slog.New(slog.NewTextHandler(log, nil))
		r.Clients, r.now = o, time.Now
		r.Inputs = func() ([]sharing.GPU, sharing.MIGConfig, error) { return nil, sharing.MIGConfig{}, errDisk }
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		wait(10 * time.Minute)
		if _, _, now := o.told(); now != "true paused-for-driver-upgrade" || len(w.journal().PausedClients) > 0 {
			t.Errorf("after a restart: labels %s, journal %q", now, w.journal().PausedClients)
		}
		cancel()
		<-done
		if told := strings.Count(log.String(), "not taken back, trying again"); told != 1 {
			t.Errorf("an API server that is away was logged %d times", told)
		}
	})
}

// TestPausedClientsNotKept checks that nothing is paused if the pause cannot be recorded for a restart.
func TestPausedClientsNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorldIn(t, "h100", "client=dcgm")
		o := newOperator(w.sim)
		c := w.program().clients
		c.PauseClients, c.Clients, w.saving = true, o, errDisk
		if labels := c.pause(t.Context()); labels != nil {
			t.Errorf("paused %q", labels)
		}
		if pauses, _, _ := o.told(); pauses != 0 {
			t.Errorf("%d pauses", pauses)
		}
	})
}

// TestPauseThatFailed checks that programs whose labels are in the journal are paused again, because their pause
// may have failed.
func TestPauseThatFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorldIn(t, "h100", "client=dcgm")
		o := newOperator(w.sim)
		o.fails = 1
		c := w.program().clients
		c.PauseClients, c.Clients = true, o
		if labels := c.pause(t.Context()); labels != nil {
			t.Errorf("paused %q, and the API server is away", labels)
		}
		labels := c.pause(t.Context())
		if pauses, _, _ := o.told(); pauses != 2 || !slices.Equal(labels, []string{dcgmLabel, exporterLabel}) {
			t.Errorf("%d pauses, labels %q", pauses, labels)
		}
	})
}

// TestPausedInVain checks that a pause that did not help is remembered for the GPU, for any partition, until such a
// program has ended or a change has succeeded.
func TestPausedInVain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorldIn(t, "h100", "client=dcgm")
		o := newOperator(w.sim)
		r := w.program()
		r.Clients, r.PauseClients, r.now = o, true, time.Now
		ctx, cancel := context.WithCancel(t.Context())
		waitingRequest, ended := w.cutter(ctx, r)
		defer func() { cancel(); <-ended }()
		programs := []string{"other (PID 7)", "dcgm (PID 8)"}
		r.Partitioner.(*nvml.Partitioner).Clients = func(int) ([]string, error) { return programs, nil }
		small, big := placed(t, "1g.10gb", 0, 1), placed(t, "3g.40gb", 0, 4)
		partitioner := nvml.NewPartitioner(w.sim, nil)
		enable := func() { // As another program does, before DCGM starts.
			steps, err := mig.Steps(false, nil, mig.PlacedLayout{MIG: true})
			for _, step := range steps {
				err = errors.Join(err, partitioner.Apply(ctx, w.sim.GPUs()[0].UUID, step))
			}
			if err != nil {
				t.Fatal(err)
			}
			w.sim.SetClient(true)
		}
		for i, step := range []struct {
			before  func()
			takes   time.Duration
			request *mig.Partition
			made    bool
			pauses  int
		}{
			{nil, 0, &small, false, 1},
			{nil, 0, &small, false, 1},
			{nil, 5 * time.Second, &big, false, 1}, // Another request.
			{nil, 5 * time.Second, &small, false, 1},
			{func() { programs = []string{"dcgm (PID 8)", "dcgm (PID 9)"} }, 5 * time.Second, &big, true, 2},
			{nil, 0, nil, false, 3},
			{func() { w.sim.SetClient(false) }, 0, nil, true, 3}, // DCGM has ended for another reason.
			{enable, 5 * time.Second, nil, true, 4},              // The same one, after one that was made.
		} {
			if step.before != nil {
				step.before()
			}
			o.mu.Lock()
			o.takes = step.takes
			o.mu.Unlock()
			err := waitingRequest(PartitionRequest{Partition: step.request})
			wait(time.Second)
			if pauses, _, _ := o.told(); (err == nil) != step.made || pauses != step.pauses {
				t.Errorf("step %d: %v after %d pauses, want %d", i, err, pauses, step.pauses)
			}
		}
	})
}
