package policy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/configs"
)

// Shelf is where profiles lie by name. A ConfigMap and a Directory are one.
type Shelf interface {
	// Source is what people call it.
	Source() string
	// Documents returns all that lies there; configs.ErrPending says that it has
	// not been read yet.
	Documents() (configs.Documents, error)
	// Watch calls changed whenever Documents would return something else, from one
	// goroutine, and returns when ctx ends.
	Watch(ctx context.Context, changed func()) error
}

// Node takes a node's profile from a shelf, by the node's labels.
type Node struct {
	Shelf Shelf
	// Labels are the Node's; nil where none are looked at.
	Labels *Labels
	// Default and Fallbacks are as in Wish.
	Default   string
	Fallbacks []Fallback
	// Overrides and Started are as in File.
	Overrides configs.Overrides
	Started   configs.Process

	last atomic.Pointer[choice]
}

// choice is what labels and documents led to, so that documents are read when
// they are others and not whenever the node's GPUs are. It is immutable.
type choice struct {
	labels    labels
	documents configs.Documents
	selected  configs.Selected
	err       error
}

// Profile returns the profile that the labels and the shelf lead to, as both were
// last seen. The error is configs.ErrPending while one of them has not been
// seen; others name source, key and value.
func (n *Node) Profile() (configs.Selected, error) {
	selected, err := n.Wanted()
	if err != nil {
		return selected, err
	}
	if err := n.Started.Check(selected.Process); err != nil {
		return configs.Selected{Name: selected.Name, Source: selected.Source}, fmt.Errorf("%s: %w", selected, err)
	}
	return selected, nil
}

// Wanted is Profile without regard to what the process runs with.
func (n *Node) Wanted() (configs.Selected, error) {
	var now labels
	var err error
	if n.Labels != nil {
		if now, err = n.Labels.seen.value(); err != nil {
			return configs.Selected{Source: n.Shelf.Source()}, err
		}
	}
	documents, err := n.Shelf.Documents()
	if err != nil {
		return configs.Selected{Source: n.Shelf.Source()}, err
	}
	if last := n.last.Load(); last != nil && last.labels == now && maps.Equal(last.documents, documents) {
		return last.selected, last.err
	}
	next := &choice{labels: now, documents: documents}
	next.selected, next.err = n.choose(now, documents)
	n.last.Store(next)
	return next.selected, next.err
}

func (n *Node) choose(now labels, documents configs.Documents) (configs.Selected, error) {
	wanted := configs.Selected{Source: n.Shelf.Source()}
	wish := Wish{Label: now.profile, Default: n.Default, Fallbacks: n.Fallbacks, Names: documents.Profiles()}
	if n.Labels != nil {
		wish.LabelName = n.Labels.Name
	}
	var err error
	if wanted.Name, err = Choose(wish); err != nil {
		return wanted, fmt.Errorf("%s: %w", n.Shelf.Source(), err)
	}
	selected, err := n.read(documents, wanted.Name)
	if err == nil {
		selected, err = n.Labels.layout(now, selected)
	}
	if err != nil {
		return wanted, err
	}
	return selected, nil
}

func (n *Node) read(documents configs.Documents, name string) (configs.Selected, error) {
	if name != "" {
		return documents.Select(n.Shelf.Source(), name, n.Overrides)
	}
	config, err := configs.Parse("", nil, n.Overrides)
	return config.Select("flags", "", nil), err
}

// Watch follows the labels and the shelf until ctx ends.
func (n *Node) Watch(ctx context.Context, changed func()) error {
	group, ctx := errgroup.WithContext(ctx)
	if n.Labels != nil {
		group.Go(func() error { return n.Labels.Watch(ctx, changed) })
	}
	group.Go(func() error { return n.Shelf.Watch(ctx, changed) })
	// For what is known without being watched, and to say what is awaited.
	changed()
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
