package agent

import (
	"context"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Partitioner is what can change how a board is cut. One goroutine of the agent
// calls it, and no call of it can be cancelled.
type Partitioner interface {
	// Cut lists how the board of that UUID is cut, exactly; what cannot be listed
	// exactly is an error.
	Cut(ctx context.Context, gpu string) (sharing.Cut, error)
	// Make makes one step. What became of it when it fails is not known.
	Make(ctx context.Context, gpu string, step mig.Step) error
}

// Journal keeps what is being changed, so that it is finished or undone after a
// crash, and what has to be made again after a reboot.
type Journal interface {
	Load() (sharing.CutJournal, error)
	// Save returns when the journal is on disk. It is not changed afterwards.
	Save(sharing.CutJournal) error
}

// withdrawal is how devices are kept from being granted; see plugin.Manager.
type withdrawal interface {
	Withdrawn(units ...string) bool
	Close(reason string, units ...string)
	Reopen(units ...string)
	Remind(units ...string)
}

// repartitioner brings the boards to their wanted layout. One goroutine has it;
// status and results are for all.
type repartitioner struct {
	partitioner Partitioner
	journal     Journal
	withdrawal  withdrawal
	// holders says who holds what; nil when nobody can.
	holders func(ctx context.Context) ([]sharing.Allocation, error)
	// show plans with what Offered says now, and returns when that is done.
	show func(ctx context.Context)
	// told is called when the status is another one.
	told func()
	// refresh has the GPUs read again.
	refresh func(ctx context.Context) error
	log     *slog.Logger
	now     func() time.Time
	// recheck is the time between two looks at a board that waits.
	recheck time.Duration

	wish       sharing.Repartition
	boards     map[string]*boardWork
	journalled sharing.CutJournal
	restored   bool
	// doubtful are the units that boards wait for and whose holders may be gone.
	doubtful map[string]bool
	// seen says that the kubelet could be read once; blindUntil is when it is not
	// waited for any more.
	seen       bool
	blindUntil time.Time

	offered atomic.Pointer[offered]
	status  atomic.Pointer[[]sharing.BoardLayout]
	results results
}

// offered is what may be offered of the boards that are being cut. It is not
// changed after it was published.
type offered struct {
	// only are the units by board, for boards that are limited.
	only map[string]map[string]bool
	// parts are the boards of which only partitions are ever offered, also when
	// their MIG mode was found off.
	parts map[string]bool
}

// results count what became of changes that had begun.
type results struct{ applied, undone, failed atomic.Uint64 }

// boardWork is what is known of one board, and done about it.
type boardWork struct {
	layout sharing.BoardLayout
	// only are the units of the board that may be offered; nil for all.
	only map[string]bool
	// blocked are those that are in the way of the layout.
	blocked []mig.Blocked
	// settling says that the board was cut into left, and that the inventory may
	// not show it yet.
	settling bool
	left     map[string]bool
	// closed are the units that Allocate refuses.
	closed []string
	// said is the last state that was logged, other than pending.
	said saying
	// refused says that the driver refused this process, so that trying again
	// would only withdraw devices again: another profile or start has to come.
	refused bool
	// failures in a row put off the next try until notBefore; undone says of the
	// last one that a change was undone.
	failures  int
	undone    bool
	notBefore time.Time
}

type saying struct {
	state  sharing.LayoutState
	reason string
}

func newRepartitioner(p Partitioner, j Journal, w withdrawal, log *slog.Logger) *repartitioner {
	r := &repartitioner{
		partitioner: p, journal: j, withdrawal: w, log: log.With("component", "mig"), now: time.Now,
		show: func(context.Context) {}, told: func() {}, refresh: func(context.Context) error { return nil },
		recheck: defaultRecheck, boards: map[string]*boardWork{},
	}
	r.status.Store(&[]sharing.BoardLayout{})
	r.offered.Store(&offered{})
	return r
}

// defaultRecheck is how often a board that waits for pods is looked at;
// drainInterval how often one that waits for the kubelet is. firstSight is how
// long, after the start, the kubelet is waited for before a board is offered that
// is to be cut.
const (
	defaultRecheck = 2 * time.Second
	drainInterval  = 250 * time.Millisecond
	firstSight     = time.Minute
)

// restore reads the journal, once.
func (r *repartitioner) restore() {
	if r.restored {
		return
	}
	r.restored = true
	var err error
	if r.journalled, err = r.journal.Load(); err != nil {
		r.log.Error("journal of MIG changes not read", "error", err)
	}
	r.limit()
}

// round attends to each board, and says when to do so again; 0 for when
// something changes. Before the node is registered, starting, nothing that might
// be in use goes: what needs devices withdrawn waits until they can be.
func (r *repartitioner) round(ctx context.Context, gpus []sharing.GPU, wish sharing.Repartition, starting bool) (again time.Duration) {
	r.restore()
	if !reflect.DeepEqual(wish, r.wish) {
		r.wish = wish
		for _, b := range r.boards {
			b.refused, b.failures, b.notBefore = false, 0, time.Time{}
		}
	}
	if r.blindUntil.IsZero() {
		r.blindUntil = r.now().Add(firstSight)
	}
	r.doubtful = map[string]bool{}
	r.dismiss(gpus)
	for _, gpu := range gpus {
		if ctx.Err() != nil {
			break
		}
		if wait := r.attend(ctx, gpu, starting); wait > 0 && (again == 0 || wait < again) {
			again = wait
		}
		r.publish()
	}
	r.publish()
	if len(r.doubtful) > 0 {
		r.withdrawal.Remind(slices.Sorted(maps.Keys(r.doubtful))...)
	}
	return again
}

// dismiss drops the work on boards that are not on the node any more. What the
// journal has of them stays there.
func (r *repartitioner) dismiss(gpus []sharing.GPU) {
	for uuid, b := range r.boards {
		if slices.ContainsFunc(gpus, func(gpu sharing.GPU) bool { return gpu.UUID == uuid }) {
			continue
		}
		r.reopen(b)
		delete(r.boards, uuid)
		r.limit()
	}
}

// board is the work on that board.
func (r *repartitioner) board(gpu sharing.GPU) *boardWork {
	b := r.boards[gpu.UUID]
	if b == nil {
		b = &boardWork{}
		r.boards[gpu.UUID] = b
	}
	b.layout.GPU, b.layout.Index, b.layout.Wanted = gpu.UUID, gpu.Index, r.wish.Name
	return b
}

// publish shows how far the boards are.
func (r *repartitioner) publish() {
	list := []sharing.BoardLayout{}
	for _, b := range r.boards {
		if b.layout.State != "" {
			list = append(list, b.layout)
		}
	}
	slices.SortFunc(list, func(a, b sharing.BoardLayout) int { return a.Index - b.Index })
	if before := *r.status.Load(); !reflect.DeepEqual(before, list) {
		r.status.Store(&list)
		r.told()
	}
}

// offer lets only those units of the board be offered, nil for all, and has that
// planned.
func (r *repartitioner) offer(ctx context.Context, b *boardWork, only map[string]bool) {
	if maps.Equal(b.only, only) && (b.only == nil) == (only == nil) {
		r.show(ctx)
		return
	}
	b.only = only
	r.limit()
	r.show(ctx)
}

// limit publishes what may be offered.
func (r *repartitioner) limit() {
	next := offered{only: map[string]map[string]bool{}, parts: map[string]bool{}}
	for gpu, b := range r.boards {
		if b.only != nil {
			next.only[gpu] = b.only
		}
	}
	for _, gpu := range r.journalled.Enabled {
		next.parts[gpu] = true
	}
	for _, change := range r.journalled.Underway {
		if next.only[change.GPU] == nil {
			// Nobody has looked yet at what of it is in both layouts.
			next.only[change.GPU] = map[string]bool{}
		}
	}
	r.offered.Store(&next)
}

// release lets the whole board be offered again, once the inventory shows it as
// it is.
func (r *repartitioner) release(ctx context.Context, b *boardWork) {
	r.reopen(b)
	if b.only != nil && !b.settling {
		r.offer(ctx, b, nil)
	}
}

func (r *repartitioner) close(b *boardWork, units []string) {
	b.closed = units
	r.withdrawal.Close("is being re-cut", units...)
}

func (r *repartitioner) reopen(b *boardWork) {
	if b.closed != nil {
		r.withdrawal.Reopen(b.closed...)
		b.closed = nil
	}
}
