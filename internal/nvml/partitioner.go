package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Partitioner lists how boards are cut and changes it, one step at a time. It
// decides nothing: which steps are wanted and whether they are safe is for its
// caller. All of its methods may be called from any goroutine, those for one
// board from one at a time.
type Partitioner struct {
	lib   Library
	quiet func(ctx context.Context, gpu string) (resume func(), err error)
}

// NewPartitioner makes a partitioner on the library, which it opens for each
// call; beside a Node that costs nothing, as the driver counts. quiet has this
// program let go of a board before its MIG mode changes, see Node.Quiet; nil
// where nothing else in this program uses it.
func NewPartitioner(lib Library, quiet func(ctx context.Context, gpu string) (resume func(), err error)) *Partitioner {
	if quiet == nil {
		quiet = func(context.Context, string) (func(), error) { return func() {}, nil }
	}
	return &Partitioner{lib: lib, quiet: quiet}
}

// Cut lists how the board of that UUID is cut. It is exact or an error: what
// cannot be listed is not left out. An error for a lack of permission wraps
// sharing.ErrNoPermission.
func (p *Partitioner) Cut(_ context.Context, gpu string) (sharing.Cut, error) {
	var cut sharing.Cut
	err := p.with(gpu, func(b *cutBoard) error {
		var err error
		cut, err = b.read()
		return err
	})
	if err != nil {
		return sharing.Cut{}, fmt.Errorf("list the partitions of %s: %w", gpu, meaning(err))
	}
	return cut, nil
}

// Make makes the step on the board of that UUID. What the step destroys and is
// not there any more counts as done; that something is in its place is an error.
// What becomes of a step that fails with Timeout is unknown: list before the
// next one.
//
// An error wraps sharing.ErrInUse, sharing.ErrNoPermission or
// sharing.ErrResetRequired where it is one of these. After ErrResetRequired the
// mode is the pending one.
func (p *Partitioner) Make(ctx context.Context, gpu string, step mig.Step) error {
	var do func(*cutBoard) error
	switch step.Action {
	case mig.EnableMIG, mig.DisableMIG:
		resume, err := p.quiet(ctx, gpu)
		if err != nil {
			return fmt.Errorf("%s of %s: let go of the board: %w", step, gpu, err)
		}
		defer resume()
		do = func(b *cutBoard) error { return b.setMode(step.Action == mig.EnableMIG) }
	case mig.DestroyCompute:
		do = func(b *cutBoard) error { return b.destroyCompute(step) }
	case mig.DestroyInstance:
		do = func(b *cutBoard) error { return b.destroyInstance(ctx, step) }
	case mig.CreateInstance:
		do = func(b *cutBoard) error { return b.createInstance(step) }
	case mig.CreateCompute:
		do = func(b *cutBoard) error { return b.createCompute(step) }
	default:
		return fmt.Errorf("no step %q", step.Action)
	}
	if err := p.with(gpu, do); err != nil {
		return fmt.Errorf("%s on %s: %w", step, gpu, meaning(err))
	}
	return nil
}

// errNoBoard says that the driver does not list the board.
var errNoBoard = errors.New("the driver does not list the GPU")

// with opens the driver and finds the board.
func (p *Partitioner) with(gpu string, do func(*cutBoard) error) (err error) {
	if err := p.lib.Init(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.lib.Shutdown()) }()
	count, err := p.lib.DeviceGetCount()
	if err != nil {
		return err
	}
	// Another board that cannot be read must not be in the way of this one.
	var unread error
	for index := range count {
		device, err := p.lib.DeviceGetHandleByIndex(index)
		if err == nil {
			var uuid string
			if uuid, err = p.lib.DeviceGetUUID(device); err == nil && uuid == gpu {
				return do(&cutBoard{lib: p.lib, device: device, index: index})
			}
		}
		if err != nil {
			unread = fmt.Errorf("read GPU %d: %w", index, err)
		}
	}
	return errors.Join(errNoBoard, unread)
}

// meaning adds to a return code what it means for whoever cuts.
func meaning(err error) error {
	for code, what := range map[Return]error{
		InUse: sharing.ErrInUse, NoPermission: sharing.ErrNoPermission, ResetRequired: sharing.ErrResetRequired,
	} {
		if errors.Is(err, code) {
			return fmt.Errorf("%w: %w", what, err)
		}
	}
	return err
}
