package nvml

import (
	"context"
	"fmt"
	"reflect"

	"github.com/virgate/virgate/sharing"
)

// order is something for Watch's goroutine to do with what it owns; done is
// closed when it has been done and published.
type order struct {
	do   func(*owner)
	done chan struct{}
}

// order lets Watch's goroutine do something and returns when it has.
func (n *Node) order(ctx context.Context, do func(*owner)) error {
	o := order{do: do, done: make(chan struct{})}
	select {
	case n.orders <- o:
		<-o.done
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (o *owner) obey(order order) {
	order.do(o)
	o.publishHealth()
	close(order.done)
}

// ClearHealth takes an operator's word that the units which the selector names,
// of a board its partitions too, may be used again, and returns their health
// after that, by board and partition. What a probe still finds wrong stays. The
// error says that there is no such unit, or that ctx ended before Watch ran.
func (n *Node) ClearHealth(ctx context.Context, selector sharing.Selector) (units []sharing.UnitHealth, err error) {
	if ordered := n.order(ctx, func(o *owner) { units, err = o.known.clear(selector, o.moment()) }); ordered != nil {
		return nil, fmt.Errorf("clear the health of %s: %w", selector, ordered)
	}
	return units, err
}

// TakeOver says that this program serves the node now: it takes over the fatal
// errors that an earlier one kept in the store, and keeps its own from now on.
// It returns when the inventory has them. The error says that ctx ended before
// Watch ran.
func (n *Node) TakeOver(ctx context.Context) error {
	if n.options.Store == nil {
		return nil
	}
	err := n.order(ctx, func(o *owner) {
		kept, err := o.options.Store.Load()
		if err != nil {
			o.log.Error("fatal errors of the last run not read", "error", err)
		}
		o.mine, o.kept = true, kept
		o.known.restore(kept, o.options.Boot, o.moment())
	})
	if err != nil {
		return fmt.Errorf("take over the fatal errors of the last run: %w", err)
	}
	return nil
}

// keep writes the fatal errors to the store, when they have changed. What cannot
// be written is tried again with whatever comes next.
func (o *owner) keep() {
	if !o.mine {
		return
	}
	fatal := o.known.fatal(o.options.Boot)
	if len(fatal) == 0 && len(o.kept) == 0 || reflect.DeepEqual(fatal, o.kept) {
		return
	}
	err := o.options.Store.Save(fatal)
	if message(err) != o.unkept && err != nil {
		o.log.Error("fatal errors not kept for a restart", "error", err)
	}
	if o.unkept = message(err); err == nil {
		o.kept = fatal
	}
}
