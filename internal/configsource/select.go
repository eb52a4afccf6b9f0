package configsource

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/wake"
)

// Fallback is what to do if neither the node's label nor a default chooses a profile; the names are
// those of NVIDIA's config-manager (k8s-device-plugin v0.17, cmd/config-manager).
type Fallback string

const (
	// FallbackNamed selects the profile that is called "default".
	FallbackNamed Fallback = "named"
	// FallbackSingle selects the only profile, if there is only one.
	FallbackSingle Fallback = "single"
	// FallbackEmpty selects the document without settings: everything exclusive.
	FallbackEmpty Fallback = "empty"
)

// namedFallback is the name of FallbackNamed's profile.
const namedFallback = "default"

// ParseFallbacks parses fallbacks, separated by commas, in the order to try; "" is none.
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

// Criteria are the inputs of Choose.
type Criteria struct {
	// LabelName is the node label's name, Label its value: "" without a label or without a Node.
	LabelName, Label string
	// Rules choose if there is no Label, by NodeLabels and Inventory: see configs.Rules.Match.
	// Their Generation is empty if there are none. Source is their location, for messages.
	Rules                 configs.Rules
	NodeLabels, Inventory map[string]string
	Source                string
	// Default is the profile if neither the label nor a rule chooses one; "" for none.
	Default string
	// Fallbacks are tried in order if there is no Default.
	Fallbacks []Fallback
	// Names are the names of the profiles.
	Names []string
}

// Chosen is the profile that the node should have.
type Chosen struct {
	// Name is "" for the empty document. Layout is the rule's layout, "" for none.
	Name, Layout string
	Choice       configs.Choice
	// Unknown is the rule that needs the node's GPUs, which are unknown; its Number is 0 for none.
	Unknown configs.RuleMatch
}

// Choose returns the profile that the node should have: the label's, else that of the first
// matching rule, else the default, else a fallback. It is pure. On an error, Name is the wanted
// profile, if any, and the error lists the existing ones.
func Choose(c Criteria) (Chosen, error) {
	chosen := Chosen{Choice: configs.Choice{Rules: c.Rules.Generation}}
	if c.Label != "" {
		chosen.Name, chosen.Choice.By = c.Label, "label "+c.LabelName
		return chosen, c.require(c.Label, "the node label "+c.LabelName)
	}
	chosen.Choice.ByInventory = len(c.Rules.InventoryLabels()) > 0
	because := ""
	if match := c.Rules.Match(c.NodeLabels, c.Inventory); match.Number > 0 {
		chosen.Name = match.Rule.Profile
		chosen.Layout = match.Rule.Layout
		chosen.Choice.Rule = match.Number
		chosen.Choice.By = fmt.Sprintf("rule %d of %s", match.Number, c.Source)
		return chosen, c.require(chosen.Name, chosen.Choice.By)
	} else if match.Unknown != nil {
		chosen.Unknown, chosen.Choice.AwaitsGPUs = match, true
		because = fmt.Sprintf(": until the node's GPUs are known, because rule %d of %s asks for %s", match.UnknownRule,
			c.Source, strings.Join(match.Unknown, ", "))
	} else if c.Rules.Generation != "" {
		because = ": no rule of " + c.Source + " matches"
	}
	switch {
	case c.Default != "":
		chosen.Name, chosen.Choice.By = c.Default, "default"+because
		return chosen, c.require(c.Default, "the default")
	case len(c.Names) == 0:
		return chosen, errors.New("there are no profiles")
	}
	for _, fallback := range c.Fallbacks {
		chosen.Choice.By = "fallback " + string(fallback) + because
		switch {
		case fallback == FallbackNamed && slices.Contains(c.Names, namedFallback):
			chosen.Name = namedFallback
			return chosen, nil
		case fallback == FallbackSingle && len(c.Names) == 1:
			chosen.Name = c.Names[0]
			return chosen, nil
		case fallback == FallbackEmpty:
			return chosen, nil
		}
	}
	chosen.Choice.By = ""
	without := "there is no default"
	if c.Rules.Generation != "" {
		without = strings.TrimPrefix(because, ": ") + ", and " + without
	}
	if c.LabelName != "" {
		without = fmt.Sprintf("the node has no label %s, and %s", c.LabelName, without)
	}
	return chosen, fmt.Errorf("%s, and no fallback of %q applies: %s", without, c.Fallbacks, c.available())
}

func (c Criteria) require(name, who string) error {
	if slices.Contains(c.Names, name) {
		return nil
	}
	return fmt.Errorf("%s names %q, which does not exist: %s", who, name, c.available())
}

func (c Criteria) available() string {
	if len(c.Names) == 0 {
		return "there are no profiles"
	}
	return "the profiles are " + strings.Join(slices.Sorted(slices.Values(c.Names)), ", ")
}

// Source has profiles by name. ConfigMap and Directory implement it.
type Source interface {
	// String returns the displayed name.
	String() string
	// Documents returns everything that it holds; configs.ErrPending before it has been read.
	Documents() (configs.Documents, error)
	// Watch calls changed whenever Documents would return something else, from one goroutine, and
	// returns when ctx ends.
	Watch(ctx context.Context, changed func()) error
}

// NodeSource chooses a node's profile from a Source, by the node's labels and the rules in the
// Source.
type NodeSource struct {
	Source Source
	// Labels are the Node's; nil if they are not read.
	Labels *NodeLabels
	// Inventory returns the GPUs' labels for rules; nil while they are unknown. The function is nil
	// in a program that never knows them.
	Inventory func() map[string]string
	// Default and Fallbacks are as in Criteria.
	Default   string
	Fallbacks []Fallback
	// Overrides and Started are as in File.
	Overrides configs.Overrides
	Started   configs.StartupSettings

	last atomic.Pointer[selection]

	// mu guards the documents in use, and the changed ones that wait until they are due.
	mu             sync.Mutex
	taken, waiting configs.Documents
	due            time.Time
	changed        func()
}

// selection is the result for labels and documents. It is cached, so that documents are parsed when
// they have changed, and not whenever the node's GPUs have.
type selection struct {
	labels    labels
	inventory map[string]string
	documents configs.Documents
	selected  configs.SelectedProfile
	err       error
}

func (s *selection) sameInputs(other *selection) bool {
	return s.labels.equal(other.labels) && maps.Equal(s.documents, other.documents) &&
		(s.inventory == nil) == (other.inventory == nil) && maps.Equal(s.inventory, other.inventory)
}

// Profile returns the profile for the labels and documents as last seen. The error is
// configs.ErrPending before both have been read; other errors name source, key and value.
func (n *NodeSource) Profile() (configs.SelectedProfile, error) {
	selected, err := n.Selected()
	return checkStarted(selected, err, n.Started)
}

// Selected is Profile without the check of the process's startup settings.
func (n *NodeSource) Selected() (configs.SelectedProfile, error) {
	pending := configs.SelectedProfile{Source: n.Source.String()}
	next := &selection{}
	var err error
	if n.Labels != nil {
		next.labels, err = n.Labels.node.value()
		if err != nil {
			return pending, err
		}
	}
	latest, err := n.Source.Documents()
	if err != nil {
		return pending, err
	}
	var delayed time.Time
	next.documents, delayed = n.take(latest, next.labels.profile != "")
	next.inventory = n.inventory(next.documents)
	last := n.last.Load()
	if last == nil || !last.sameInputs(next) {
		next.selected, next.err = n.choose(next.labels, next.inventory, next.documents)
		n.last.Store(next)
		last = next
	}
	selected := last.selected
	selected.Delayed = delayed
	return selected, last.err
}

// inventory returns the labels of the GPUs, if there are rules.
func (n *NodeSource) inventory(documents configs.Documents) map[string]string {
	if _, rules := documents[configs.RulesName]; !rules || n.Inventory == nil {
		return nil
	}
	return n.Inventory()
}

// take returns the documents to use. Rules can spread a changed ConfigMap over time: each node then
// takes it after a random time. Until then, take returns the older documents, and when the new ones
// are due. A node whose own label names a profile takes it at once, and so does a node without
// documents.
func (n *NodeSource) take(latest configs.Documents, atOnce bool) (documents configs.Documents, due time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	if n.taken != nil && !atOnce && !maps.Equal(n.taken, latest) && !maps.Equal(n.waiting, latest) {
		n.waiting = latest
		due := now.Add(time.Duration(rand.Float64() * float64(n.spread(latest))))
		if n.due.IsZero() || due.Before(n.due) { // Frequent changes must not delay it.
			n.due = due
			if n.changed != nil && due.After(now) {
				time.AfterFunc(due.Sub(now), n.changed)
			}
		}
	}
	if n.taken == nil || atOnce || maps.Equal(n.taken, latest) || !now.Before(n.due) {
		n.taken = latest
		n.waiting = nil
		n.due = time.Time{}
	}
	return n.taken, n.due
}

// spread returns how long a change may take, from the new rules, or from the old ones if there are
// none any more. It is 0 for wrong rules, so that their error shows at once, and for those that
// replace wrong ones, because the node rejects these meanwhile.
func (n *NodeSource) spread(latest configs.Documents) time.Duration {
	rules, there, err := latest.Rules("")
	before, _, wrong := n.taken.Rules("")
	if !there {
		rules = before
	}
	if err != nil || wrong != nil {
		return 0
	}
	return rules.Spread
}

// WithLabel returns what Profile would return if the Node's label had that value. It also fails if
// that label is not used.
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
	n.mu.Lock()
	if now.profile == "" && n.taken != nil {
		documents = n.taken
	}
	n.mu.Unlock()
	selected, err = n.choose(now, n.inventory(documents), documents)
	return checkStarted(selected, cmp.Or(err, checkLayout(label, selected)), n.Started)
}

// checkLayout returns an error if the label names a layout and no program would make it.
func checkLayout(label string, selected configs.SelectedProfile) error {
	if mig := selected.Profile.MIG; label == MIGLabel && !mig.Manage && mig.LeftTo == "" {
		return fmt.Errorf("%s: it does not have mig.manage: true, so Virgate makes no MIG layout", selected)
	}
	return nil
}

func (n *NodeSource) choose(
	now labels,
	inventory map[string]string,
	documents configs.Documents,
) (configs.SelectedProfile, error) {
	source := n.Source.String()
	wanted := configs.SelectedProfile{Source: source}
	criteria := Criteria{
		Label:      now.profile,
		NodeLabels: now.others,
		Inventory:  inventory,
		Source:     source,
		Default:    n.Default,
		Fallbacks:  n.Fallbacks,
		Names:      documents.ProfileNames(),
	}
	var err error
	criteria.Rules, _, err = documents.Rules(source)
	if err != nil && now.profile == "" {
		wanted.Choice = configs.Choice{By: "refused rules of " + source, Rules: criteria.Rules.Generation}
		return wanted, err
	}
	if n.Labels != nil {
		criteria.LabelName = n.Labels.Name
	}
	chosen, err := Choose(criteria)
	wanted.Name, wanted.Choice = chosen.Name, chosen.Choice
	switch {
	case chosen.Unknown.Unknown != nil && n.Inventory == nil:
		wanted.Name = "" // It may be another one.
		return wanted,
			fmt.Errorf("%s[%s]: rule %d asks for %s, which only virgate run --config-map or --config-dir knows", source,
				configs.RulesName,
				chosen.Unknown.UnknownRule, strings.Join(chosen.Unknown.Unknown, ", "))
	case err != nil:
		return wanted, fmt.Errorf("%s: %w", source, err)
	}
	var selected configs.SelectedProfile
	if chosen.Name == "" {
		selected, err = parseFlags(n.Overrides)
	} else {
		selected, err = documents.Select(source, chosen.Name, n.Overrides)
	}
	if err == nil {
		selected, err = n.Labels.layout(now, selected)
	}
	if err == nil && now.layout == "" && chosen.Layout != "" {
		selected, err = selected.SelectRuleMIG(chosen.Layout)
		if err != nil {
			err = fmt.Errorf("%s: %s: %w", selected, chosen.Choice.By, err)
		}
	}
	if err != nil {
		return wanted, err
	}
	selected.Choice = chosen.Choice
	return selected, nil
}

// checkStarted rejects a profile that needs other settings than the process has. If
// configs.ErrNoMPS is the only reason, it returns the profile with that error.
func checkStarted(
	selected configs.SelectedProfile,
	err error,
	started configs.StartupSettings,
) (configs.SelectedProfile, error) {
	if err != nil {
		return selected, err
	}
	unchanged := started.CheckUnchanged(selected.Startup)
	if unchanged != nil && selected.Choice.ByInventory {
		unchanged = fmt.Errorf(
			"%w; where rules ask for labels of the GPUs, the process starts with the default's settings: give their "+
				"profiles the same", unchanged)
	}
	if err := errors.Join(unchanged, selected.CheckOffered()); err != nil {
		return selected.Refused(), fmt.Errorf("%s: %w", selected, err)
	}
	if err := selected.CheckMPS(); err != nil {
		return selected, fmt.Errorf("%s: %w", selected, err)
	}
	return selected, nil
}

// Watch follows labels and documents until ctx ends.
func (n *NodeSource) Watch(ctx context.Context, changed func()) error {
	n.mu.Lock()
	n.changed = changed
	n.mu.Unlock()
	group, ctx := errgroup.WithContext(ctx)
	if n.Labels != nil {
		group.Go(func() error { return n.Labels.Watch(ctx, changed) })
	}
	group.Go(func() error { return n.Source.Watch(ctx, changed) })
	// For inputs that are known without a watch, and to report what is awaited.
	changed()
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// Watching is a NodeSource that is watched before it has a listener: the profile's process settings
// must be known before the rest of the program is made.
type Watching struct {
	*NodeSource
	listener atomic.Pointer[func()]
	moved    wake.Signal
	cancel   context.CancelFunc
	ended    chan error
}

// StartWatching watches the source. The caller must call Stop.
func StartWatching(ctx context.Context, source *NodeSource) *Watching {
	ctx, cancel := context.WithCancel(ctx)
	w := &Watching{
		NodeSource: source,
		moved:      wake.NewSignal(),
		cancel:     cancel,
		ended:      make(chan error, 1),
	}
	go func() { w.ended <- source.Watch(ctx, w.changed) }()
	return w
}

func (w *Watching) changed() {
	if listener := w.listener.Load(); listener != nil {
		(*listener)()
	}
	w.moved.Notify()
}

// Await returns when enough returns true or ctx ends. It calls enough after every change before
// Watch.
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

// Stop ends the watch and waits for its end.
func (w *Watching) Stop() error {
	w.cancel()
	return <-w.ended
}
