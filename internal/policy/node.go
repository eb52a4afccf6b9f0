package policy

import (
	"context"
	"errors"
	"fmt"

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

// Node takes a node's profile from a shelf, by the node's label.
type Node struct {
	Shelf Shelf
	// Label is the Node's label; nil where none is looked at.
	Label *Label
	// Default and Fallbacks are as in Wish.
	Default   string
	Fallbacks []Fallback
	// Overrides and Started are as in File.
	Overrides configs.Overrides
	Started   configs.Process
}

// Profile returns the profile that the label and the shelf lead to, as both were
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
	wanted := configs.Selected{Source: n.Shelf.Source()}
	wish := Wish{Default: n.Default, Fallbacks: n.Fallbacks}
	if n.Label != nil {
		value, err := n.Label.Value()
		if err != nil {
			return wanted, err
		}
		wish.LabelName, wish.Label = n.Label.Name, value
	}
	documents, err := n.Shelf.Documents()
	if err != nil {
		return wanted, err
	}
	wish.Names = documents.Profiles()
	wanted.Name, err = Choose(wish)
	if err != nil {
		return wanted, fmt.Errorf("%s: %w", n.Shelf.Source(), err)
	}
	selected, err := n.read(documents, wanted.Name)
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

// Watch follows the label and the shelf until ctx ends.
func (n *Node) Watch(ctx context.Context, changed func()) error {
	group, ctx := errgroup.WithContext(ctx)
	if n.Label != nil {
		group.Go(func() error { return n.Label.Watch(ctx, changed) })
	}
	group.Go(func() error { return n.Shelf.Watch(ctx, changed) })
	// For what is known without being watched, and to say what is awaited.
	changed()
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
