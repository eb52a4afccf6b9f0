package configsource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/configs"
)

// Fallback is what to do when neither the node's label nor a default chooses a profile, as
// NVIDIA's config-manager calls it (k8s-device-plugin v0.17, cmd/config-manager).
type Fallback string

const (
	// FallbackNamed takes the profile that is called "default".
	FallbackNamed Fallback = "named"
	// FallbackSingle takes the only profile there is.
	FallbackSingle Fallback = "single"
	// FallbackEmpty takes the document without settings: everything exclusive.
	FallbackEmpty Fallback = "empty"
)

// namedFallback is the profile's name that FallbackNamed looks for.
const namedFallback = "default"

// ParseFallbacks reads fallbacks, separated by commas, in the order to try; "" is none.
func ParseFallbacks(s string) ([]Fallback, error) {
	var fallbacks []Fallback
	for item := range strings.SplitSeq(s, ",") {
		item = strings.TrimSpace(item)
		switch f := Fallback(item); {
		case item == "":
		case f != FallbackNamed && f != FallbackSingle && f != FallbackEmpty:
			return nil, fmt.Errorf("expected %s, %s or %s (got %q)", FallbackNamed, FallbackSingle, FallbackEmpty, item)
		case slices.Contains(fallbacks, f):
			return nil, fmt.Errorf("%s is listed twice", f)
		default:
			fallbacks = append(fallbacks, f)
		}
	}
	return fallbacks, nil
}

// Criteria are all that Choose depends on.
type Criteria struct {
	// LabelName is the node label's name, Label its value: "" without one or without a Node.
	LabelName, Label string
	// Default is the profile of a node without the label; "" for none.
	Default string
	// Fallbacks are tried in order where there is no Default.
	Fallbacks []Fallback
	// Names are the profiles there are.
	Names []string
}

// Choose returns the name of the profile that the node should have; "" for the
// empty document. It is a pure function. With an error, the name is what was
// wanted, if anything was; the error then lists what there is.
func Choose(c Criteria) (name string, err error) {
	switch {
	case c.Label != "":
		return c.Label, c.require(c.Label, "the node label "+c.LabelName)
	case c.Default != "":
		return c.Default, c.require(c.Default, "the default")
	case len(c.Names) == 0:
		return "", errors.New("it holds no profile")
	}
	for _, fallback := range c.Fallbacks {
		switch {
		case fallback == FallbackNamed && slices.Contains(c.Names, namedFallback):
			return namedFallback, nil
		case fallback == FallbackSingle && len(c.Names) == 1:
			return c.Names[0], nil
		case fallback == FallbackEmpty:
			return "", nil
		}
	}
	without := "there is no default"
	if c.LabelName != "" {
		without = fmt.Sprintf("the node has no label %s, and %s", c.LabelName, without)
	}
	return "", fmt.Errorf("%s, and no fallback of %q applies: %s", without, c.Fallbacks, c.available())
}

func (c Criteria) require(name, who string) error {
	if slices.Contains(c.Names, name) {
		return nil
	}
	return fmt.Errorf("%s wants %q: %s", who, name, c.available())
}

func (c Criteria) available() string {
	if len(c.Names) == 0 {
		return "it holds no profile"
	}
	return "it holds " + strings.Join(slices.Sorted(slices.Values(c.Names)), ", ")
}

// Source has profiles by name. A ConfigMap and a Directory are one.
type Source interface {
	// String is what people call it.
	String() string
	// Documents returns all that it holds; configs.ErrPending before it has been read.
	Documents() (configs.Documents, error)
	// Watch calls changed whenever Documents would return something else, from one
	// goroutine, and returns when ctx ends.
	Watch(ctx context.Context, changed func()) error
}

// NodeSource takes a node's profile from a Source, by the node's labels.
type NodeSource struct {
	Source Source
	// Labels are the Node's; nil where none are looked at.
	Labels *NodeLabels
	// Default and Fallbacks are as in Criteria.
	Default   string
	Fallbacks []Fallback
	// Overrides and Started are as in File.
	Overrides configs.Overrides
	Started   configs.StartupSettings

	last atomic.Pointer[selection]
}

// selection is what labels and documents led to. It is kept so that documents are
// parsed when they have changed, and not whenever the node's GPUs have.
type selection struct {
	labels    labels
	documents configs.Documents
	selected  configs.SelectedProfile
	err       error
}

// Profile returns the profile that labels and documents lead to, as last seen. The error is
// configs.ErrPending while one of them has not been; others name source, key and value.
func (n *NodeSource) Profile() (configs.SelectedProfile, error) {
	selected, err := n.Selected()
	return checkStarted(selected, err, n.Started)
}

// Selected is Profile without regard to what the process was started with.
func (n *NodeSource) Selected() (configs.SelectedProfile, error) {
	pending := configs.SelectedProfile{Source: n.Source.String()}
	next := &selection{}
	var err error
	if n.Labels != nil {
		if next.labels, err = n.Labels.node.value(); err != nil {
			return pending, err
		}
	}
	if next.documents, err = n.Source.Documents(); err != nil {
		return pending, err
	}
	if last := n.last.Load(); last != nil && last.labels == next.labels && maps.Equal(last.documents, next.documents) {
		return last.selected, last.err
	}
	next.selected, next.err = n.choose(next.labels, next.documents)
	n.last.Store(next)
	return next.selected, next.err
}

// WithLabel is Profile as it would be if the Node's label of that name had that value. The error
// can also be that no such label is looked at.
func (n *NodeSource) WithLabel(label, value string) (configs.SelectedProfile, error) {
	selected := configs.SelectedProfile{Source: n.Source.String()}
	now, err := n.Labels.with(label, value)
	if err != nil {
		return selected, err
	}
	documents, err := n.Source.Documents()
	if err != nil {
		return selected, err
	}
	selected, err = n.choose(now, documents)
	return checkStarted(selected, cmp.Or(err, checkLayout(label, selected)), n.Started)
}

// checkLayout says that nobody would make a layout that the label named.
func checkLayout(label string, selected configs.SelectedProfile) error {
	if mig := selected.Profile.MIG; label == MIGLabel && !mig.Manage && mig.LeftTo == "" {
		return fmt.Errorf("%s: it does not have mig.manage: true, so Virgate makes no MIG layout", selected)
	}
	return nil
}

func (n *NodeSource) choose(now labels, documents configs.Documents) (configs.SelectedProfile, error) {
	criteria := Criteria{Label: now.profile, Default: n.Default, Fallbacks: n.Fallbacks, Names: documents.ProfileNames()}
	if n.Labels != nil {
		criteria.LabelName = n.Labels.Name
	}
	name, err := Choose(criteria)
	wanted := configs.SelectedProfile{Name: name, Source: n.Source.String()}
	if err != nil {
		return wanted, fmt.Errorf("%s: %w", n.Source, err)
	}
	var selected configs.SelectedProfile
	if name == "" {
		selected, err = parseFlags(n.Overrides)
	} else {
		selected, err = documents.Select(n.Source.String(), name, n.Overrides)
	}
	if err == nil {
		selected, err = n.Labels.layout(now, selected)
	}
	if err != nil {
		return wanted, err
	}
	return selected, nil
}

// checkStarted refuses a profile that needs other settings than the process has. One that it
// refuses for nothing but configs.ErrNoMPS comes with the error.
func checkStarted(selected configs.SelectedProfile, err error, started configs.StartupSettings) (configs.SelectedProfile, error) {
	if err != nil {
		return selected, err
	}
	if err := errors.Join(started.CheckUnchanged(selected.Startup), selected.CheckOffered()); err != nil {
		return configs.SelectedProfile{Name: selected.Name, Source: selected.Source}, fmt.Errorf("%s: %w", selected, err)
	}
	if err := selected.CheckMPS(); err != nil {
		return selected, fmt.Errorf("%s: %w", selected, err)
	}
	return selected, nil
}

// Watch follows labels and documents until ctx ends.
func (n *NodeSource) Watch(ctx context.Context, changed func()) error {
	group, ctx := errgroup.WithContext(ctx)
	if n.Labels != nil {
		group.Go(func() error { return n.Labels.Watch(ctx, changed) })
	}
	group.Go(func() error { return n.Source.Watch(ctx, changed) })
	// For what is known without being watched, and to say what is awaited.
	changed()
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// Watching is a NodeSource that is watched before anybody listens: what the profile says
// about the process must be known when the rest of the program is made.
type Watching struct {
	*NodeSource
	listener atomic.Pointer[func()]
	moved    chan struct{}
	cancel   context.CancelFunc
	ended    chan error
}

// StartWatching watches the source. Stop must be called.
func StartWatching(ctx context.Context, source *NodeSource) *Watching {
	ctx, cancel := context.WithCancel(ctx)
	w := &Watching{NodeSource: source, moved: make(chan struct{}, 1), cancel: cancel, ended: make(chan error, 1)}
	go func() { w.ended <- source.Watch(ctx, w.changed) }()
	return w
}

func (w *Watching) changed() {
	if listener := w.listener.Load(); listener != nil {
		(*listener)()
	}
	select {
	case w.moved <- struct{}{}:
	default:
	}
}

// Await returns when enough does, asked at every change before Watch, or when ctx ends.
func (w *Watching) Await(ctx context.Context, enough func() bool) {
	for !enough() {
		select {
		case <-ctx.Done():
			return
		case <-w.moved:
		}
	}
}

// Watch calls changed at once and at every change until ctx ends.
func (w *Watching) Watch(ctx context.Context, changed func()) error {
	w.listener.Store(&changed)
	changed()
	<-ctx.Done()
	return nil
}

// Stop ends the watching and returns when it has ended.
func (w *Watching) Stop() error {
	w.cancel()
	return <-w.ended
}
