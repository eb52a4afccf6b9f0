package agent

import (
	"context"
	"log/slog"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Once is what RepartitionOnce needs.
type Once struct {
	Partitioner Partitioner
	Journal     Journal
	// Holders says who holds what; nil where no kubelet hands out these GPUs.
	Holders plugin.Kubelet
	// Inventory reads the GPUs.
	Inventory func() ([]sharing.GPU, error)
	Wish      sharing.Repartition
	Logger    *slog.Logger
}

// RepartitionOnce brings the boards to their layouts as far as that goes now,
// where no program serves the kubelet: there is nothing to withdraw, and what
// pods and processes use is left alone. It returns what became of the boards, by
// index. The error says that the GPUs could not be read.
func RepartitionOnce(ctx context.Context, o Once) ([]sharing.BoardLayout, error) {
	r := newRepartitioner(o.Partitioner, o.Journal, unserved{}, o.Logger)
	r.holders = nobody
	if o.Holders != nil {
		r.holders = o.Holders.Held
	}
	for range startPasses {
		gpus, err := o.Inventory()
		if err != nil {
			return nil, err
		}
		if again := r.round(ctx, gpus, o.Wish, false); again == 0 || again > soon {
			break
		}
	}
	return *r.status.Load(), nil
}

// nobody holds anything.
func nobody(context.Context) ([]sharing.Allocation, error) { return nil, nil }

// unserved is a node without a kubelet that could be told of devices.
type unserved struct{}

func (unserved) Withdrawn(...string) bool { return true }
func (unserved) Close(string, ...string)  {}
func (unserved) Reopen(...string)         {}
func (unserved) Remind(...string)         {}
