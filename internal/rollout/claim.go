package rollout

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Spec describes a rollout to start.
type Spec struct {
	// To is the profile, or with MIG the layout. Label is the label's name; "" means the default.
	To, Label string
	MIG       bool
	// Selector selects Nodes by labels, in kubectl's syntax.
	Selector string
	// MaxUnavailable limits the nodes under way at once, in the format of ParseMax.
	MaxUnavailable string
	// PauseAfter is the number of waves after which the rollout pauses; 0 for never.
	PauseAfter int
	// Timeout is how long one node may take.
	Timeout time.Duration
	// Domain is the domain of the resources. AllowUnhealthy ignores devices that are not allocatable.
	Domain         string
	AllowUnhealthy bool
	// SkipUnready leaves out nodes that cannot follow now. Without it, such a node is an error.
	SkipUnready bool
}

// cleanUp limits the time for writes after an interruption.
const cleanUp = 30 * time.Second

// pick returns the Nodes that the Spec selects, by name, with those that cannot follow now in
// unready. It fails if no Node is selected, or if one belongs to another rollout that has not
// ended.
func (s Spec) pick(nodes []Node, plans []plan) (chosen, unready []Node, err error) {
	selector, err := labels.Parse(s.Selector)
	if err != nil {
		return nil, nil, fmt.Errorf("selector: %w", err)
	}
	for _, n := range nodes {
		if !selector.Matches(labels.Set(n.Labels)) {
			continue
		}
		for _, p := range plans {
			if p.has(n.Name) && !p.Phase.Ended() {
				return nil, nil, p.taken(n.Name)
			}
		}
		if s.unready(n) != "" {
			unready = append(unready, n)
		} else {
			chosen = append(chosen, n)
		}
	}
	if len(chosen)+len(unready) == 0 {
		return nil, nil, fmt.Errorf("no node has the labels %s", s.Selector)
	}
	return chosen, unready, nil
}

// taken returns the error that the node belongs to this rollout.
func (p plan) taken(node string) error {
	return fmt.Errorf("node %s belongs to rollout %s to %s, which %s began at %s and which has not ended",
		node, p.ID, p.To, p.By, p.Started.UTC().Format(time.RFC3339))
}

// unready returns why a node cannot follow now, or "" if it can.
func (s Spec) unready(n Node) string {
	switch {
	case n.NotReady != "":
		return n.NotReady
	case n.Condition.Status == corev1.ConditionUnknown:
		return "GPUSharingReady is Unknown: " + n.Condition.Reason
	case !s.MIG && n.State == "":
		return "no Virgate has said there how its profile is"
	}
	return ""
}

// choice holds the Nodes that a rollout would have.
type choice struct {
	Params
	nodes []Node
	// unready lists the nodes that cannot follow now, with the reasons.
	unready []string
}

// choose reads the rollouts and the Nodes, and changes nothing. The error explains why a rollout of
// the Spec could not begin.
func (c *Client) choose(ctx context.Context, spec Spec) (chosen choice, err error) {
	chosen.Params, err = spec.params(c.Holder)
	if err != nil {
		return chosen, err
	}
	plans, err := c.plans(ctx)
	if err != nil {
		return chosen, err
	}
	nodes, err := c.nodes(ctx, func(string) string { return chosen.Domain })
	if err != nil {
		return chosen, err
	}
	ready, unready, err := spec.pick(nodes, plans)
	if err != nil {
		return chosen, err
	}
	chosen.nodes = ready
	for _, n := range unready {
		chosen.unready = append(chosen.unready, n.Name+": "+spec.unready(n))
	}
	switch {
	case len(unready) > 0 && !spec.SkipUnready:
		return chosen, fmt.Errorf("%d of %d nodes cannot follow now; --skip-unready leaves them out:\n%s",
			len(unready), len(ready)+len(unready), summary(chosen.unready))
	case len(ready) == 0:
		return chosen, fmt.Errorf("none of %d nodes can follow now:\n%s", len(unready), summary(chosen.unready))
	}
	chosen.Max, err = ParseMax(spec.MaxUnavailable, len(ready))
	if err != nil {
		return chosen, fmt.Errorf("--max-unavailable: %w", err)
	}
	return chosen, nil
}

// Start makes the nodes part of a new rollout. It sets no label yet: the caller calls Drive next,
// with the same c.Holder. If Start fails, it removes what it wrote.
func (c *Client) Start(ctx context.Context, spec Spec) (*Rollout, error) {
	chosen, err := c.choose(ctx, spec)
	if err != nil {
		return nil, err
	}
	if len(chosen.unready) > 0 {
		c.notice("left out, because they cannot follow now: %s", summary(chosen.unready))
	}
	p := plan{
		Params: chosen.Params,
		State: State{
			Phase:   Claiming,
			PauseAt: spec.PauseAfter,
			Holder:  c.Holder,
			Renewed: time.Now().UTC(),
		},
	}
	for _, n := range chosen.nodes {
		p.members = append(p.members, member{n.Name, n.label(p.Label)})
	}
	if err := c.claim(ctx, p); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUp)
		defer cancel()
		return nil, errors.Join(err, c.remove(ctx, p.ID))
	}
	return c.Find(ctx, p.ID)
}

// claim writes the plan and sets it to Running, unless another rollout has one of its nodes. If two
// rollouts begin at once, the later one sees the earlier one and gives way. claim also removes the
// nodes from rollouts that have ended, so that a node is part of only one rollout.
func (c *Client) claim(ctx context.Context, p plan) error {
	created, err := c.create(ctx, p)
	if err != nil {
		return err
	}
	plans, err := c.plans(ctx)
	if err != nil {
		return err
	}
	var ended []plan
	for _, other := range plans {
		i := slices.IndexFunc(p.members, func(m member) bool { return other.has(m.name) })
		switch {
		case other.ID == p.ID || i < 0:
		case other.Phase.Ended():
			ended = append(ended, other)
		case other.Phase == Claiming && later(other.version, created.version): // The other one gives way.
		default:
			return other.taken(p.members[i].name)
		}
	}
	for _, other := range ended {
		if err := c.takeFrom(ctx, other, p); err != nil {
			return err
		}
	}
	_, err = c.writeState(ctx, created, func(s *State) error {
		if s.Phase != Claiming && s.Phase != Running { // It is Running if the answer to this write was lost.
			return fmt.Errorf("rollout %s is %s by now", p.ID, s.Phase)
		}
		s.Phase = Running
		return s.renew(c.Holder)
	})
	return err
}

// takeFrom removes p's nodes from a rollout that has ended. It fails if that rollout is being
// undone by now.
func (c *Client) takeFrom(ctx context.Context, ended, p plan) error {
	for {
		rest := ended.without(p)
		var err error
		if len(rest.members) == 0 {
			err = c.delete(ctx, ended)
		} else {
			_, err = c.patchPlan(ctx, ended, map[string]string{nodesKey: rest.encodeNodes()})
		}
		if err == nil || !gone(err) {
			return err
		}
		ended, err = c.plan(ctx, ended.ID)
		if errors.Is(err, errNone) {
			return nil
		} else if err != nil {
			return err
		}
		if !ended.Phase.Ended() {
			return fmt.Errorf("rollout %s, which had ended and had some of these nodes, is %s by now", ended.ID,
				ended.Phase)
		}
	}
}

// remove deletes the ConfigMap of a rollout, unless another holder drives it.
func (c *Client) remove(ctx context.Context, id string) error {
	for {
		p, err := c.plan(ctx, id)
		if errors.Is(err, errNone) {
			return nil
		}
		if err != nil {
			return err
		}
		if p.Holder != "" && p.Holder != c.Holder {
			return fmt.Errorf("rollout %s: %w: %s", id, errHeld, p.Holder)
		}
		if err := c.delete(ctx, p); err == nil || !gone(err) {
			return err
		}
	}
}

func (s Spec) params(holder string) (Params, error) {
	label := ProfileLabel
	if s.MIG {
		label = LayoutLabel
	}
	problem := func(what string, problems []string) error {
		return fmt.Errorf("%s: %s", what, problems[0])
	}
	p := Params{
		Label:          cmp.Or(s.Label, label),
		To:             s.To,
		MIG:            s.MIG,
		By:             holder,
		Started:        time.Now().UTC().Truncate(time.Second),
		Selector:       s.Selector,
		Timeout:        int(s.Timeout / time.Second),
		Domain:         cmp.Or(s.Domain, "nvidia.com"),
		AllowUnhealthy: s.AllowUnhealthy,
	}
	if problems := validation.IsValidLabelValue(p.To); p.To == "" || len(problems) > 0 {
		return p, problem(fmt.Sprintf("%q cannot be a label's value", p.To), append(problems, "it is empty"))
	}
	if problems := validation.IsQualifiedName(p.Label); len(problems) > 0 {
		return p, problem(fmt.Sprintf("%q cannot be a label's name", p.Label), problems)
	}
	if p.Timeout < 1 {
		return p, fmt.Errorf("the time-out must be a second at least, got %s", s.Timeout)
	}
	random := make([]byte, 2)
	_, _ = rand.Read(random) // It never fails.
	p.ID = p.Started.Format("20060102-150405-") + hex.EncodeToString(random)
	return p, nil
}

// each calls do for all nodes, up to atOnce at a time, and waits for all calls.
func each(nodes []Node, do func(i int, n Node)) {
	var running sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for i, n := range nodes {
		slots <- struct{}{}
		running.Go(func() {
			do(i, n)
			<-slots
		})
	}
	running.Wait()
}

// release removes the rollout's annotations from its nodes, and then deletes its ConfigMap. It does
// not change labels.
func (c *Client) release(ctx context.Context, id string) error {
	r, err := c.Find(ctx, id)
	if err != nil {
		return err
	}
	var mutex sync.Mutex
	var errs []error
	each(r.Nodes, func(_ int, n Node) {
		err := c.releaseOne(ctx, n, id)
		mutex.Lock()
		defer mutex.Unlock()
		errs = append(errs, err)
	})
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("not all nodes were given back: %w", err)
	}
	return c.remove(ctx, id)
}

func (c *Client) releaseOne(ctx context.Context, n Node, id string) error {
	for {
		if n.Progress == nil || n.Progress.Rollout != id {
			return nil
		}
		_, err := c.patch(ctx, n, change{annotations: map[string]*string{RecordAnnotation: nil}})
		if err == nil || !gone(err) {
			return err
		}
		found := false
		n, found, err = c.get(ctx, n.Name, "")
		if err != nil || !found {
			return err
		}
	}
}

// List returns the rollouts of the namespace, oldest first.
func (c *Client) List(ctx context.Context) ([]*Rollout, error) {
	plans, err := c.plans(ctx)
	if err != nil || len(plans) == 0 {
		return nil, err
	}
	return c.withNodes(ctx, plans)
}

// Find returns the rollout with that ID.
func (c *Client) Find(ctx context.Context, id string) (*Rollout, error) {
	p, err := c.plan(ctx, id)
	if err != nil {
		return nil, err
	}
	list, err := c.withNodes(ctx, []plan{p})
	if err != nil {
		return nil, err
	}
	return list[0], nil
}

// withNodes joins the plans with the current Nodes.
func (c *Client) withNodes(ctx context.Context, plans []plan) (list []*Rollout, err error) {
	domains := map[string]string{}
	for _, p := range plans {
		for _, m := range p.members {
			domains[m.name] = p.Domain
		}
	}
	nodes, err := c.nodes(ctx, func(node string) string { return domains[node] })
	if err != nil {
		return nil, err
	}
	byName := map[string]Node{}
	for _, n := range nodes {
		byName[n.Name] = n
	}
	for _, p := range plans {
		list = append(list, p.join(byName))
	}
	return list, nil
}

// Pause ends the driver: it begins no more nodes. The driver notices within a second.
func (c *Client) Pause(ctx context.Context, id string) error {
	p, err := c.plan(ctx, id)
	if err != nil {
		return err
	}
	_, err = c.writeState(ctx, p, func(s *State) error {
		if s.Phase != Running {
			return fmt.Errorf("rollout %s does not run: it is %s", id, s.Phase)
		}
		s.Phase, s.Reason = Paused, "by "+c.Holder
		return nil
	})
	return err
}

// Forget deletes a rollout's ConfigMap and its nodes' annotations, so that it can no longer be
// undone. It does not change labels. A rollout that has not ended is an error unless unfinished is
// true.
func (c *Client) Forget(ctx context.Context, id string, unfinished bool) error {
	_, err := c.run(ctx, id, func(_ context.Context, _ *driver, r *Rollout) error {
		if !r.Phase.Ended() && !unfinished {
			return fmt.Errorf("rollout %s has not ended: it is %s", id, r.Phase)
		}
		return errRelease
	}, false)
	if errors.Is(err, errRelease) {
		err = c.release(ctx, id)
	}
	return err
}
