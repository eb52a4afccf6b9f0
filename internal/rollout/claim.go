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

// Spec is what is asked for.
type Spec struct {
	// To is the profile, or with MIG the layout. Label is the label's name; "" for the usual one.
	To, Label string
	MIG       bool
	// Selector selects Nodes by labels, as for kubectl.
	Selector string
	// MaxUnavailable is how many nodes may be under way at once, as ParseMax reads it.
	MaxUnavailable string
	// PauseAfter is after how many waves it pauses; 0 for none.
	PauseAfter int
	// Timeout is how long a node may take.
	Timeout time.Duration
	// Domain is that of the resources; AllowIll does not look at those that are not allocatable.
	Domain   string
	AllowIll bool
	// SkipUnready leaves out nodes that cannot follow now; otherwise nothing is begun.
	SkipUnready bool
}

// cleanUp is how long what is written after an interruption may take.
const cleanUp = 30 * time.Second

// Select returns the Nodes that the Spec means, by name, those that cannot follow now apart, and an
// error where there is none, or one belongs to another rollout that has not ended.
func (s Spec) Select(nodes []Node) (chosen, unready []Node, err error) {
	selector, err := labels.Parse(s.Selector)
	if err != nil {
		return nil, nil, fmt.Errorf("selector: %w", err)
	}
	list, err := rollouts(nodes)
	if err != nil {
		return nil, nil, err
	}
	ended := endedIDs(list)
	for _, n := range nodes {
		if !selector.Matches(labels.Set(n.Labels)) {
			continue
		}
		if err := n.taken(ended); err != nil {
			return nil, nil, err
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

func endedIDs(list []*Rollout) map[string]bool {
	ended := map[string]bool{}
	for _, r := range list {
		ended[r.ID] = r.Phase.Ended()
	}
	return ended
}

// taken says which rollout has the node, nil where it may have another one.
func (n Node) taken(ended map[string]bool) error {
	if n.Unread != nil {
		return n.Unread
	}
	if r := n.Record; r != nil && (!ended[r.ID] || r.Place == Undoing) {
		return fmt.Errorf("node %s belongs to rollout %s to %s, which %s began at %s and which has not ended", n.Name, r.ID, r.To, r.By, r.Started.UTC().Format(time.RFC3339))
	}
	return nil
}

// unready says why a node cannot follow; "" where it can.
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

// choice is which Nodes a rollout would have.
type choice struct {
	Params
	nodes []Node
	// unready are those that cannot follow now, with the reasons.
	unready []string
	ended   map[string]bool
}

// choose reads the Nodes, and changes nothing. The error says why a rollout of the Spec could not
// begin.
func (c *Client) choose(ctx context.Context, spec Spec) (chosen choice, err error) {
	if chosen.Params, err = spec.params(c.Holder); err != nil {
		return chosen, err
	}
	nodes, err := c.nodes(ctx)
	if err != nil {
		return chosen, err
	}
	ready, unready, err := spec.Select(nodes)
	if err != nil {
		return chosen, err
	}
	chosen.nodes = ready
	for _, n := range unready {
		chosen.unready = append(chosen.unready, n.Name+": "+spec.unready(n))
	}
	switch {
	case len(unready) > 0 && !spec.SkipUnready:
		return chosen, fmt.Errorf("%d of %d nodes cannot follow now; --skip-unready leaves them out:\n%s", len(unready), len(ready)+len(unready), summary(chosen.unready))
	case len(ready) == 0:
		return chosen, fmt.Errorf("none of %d nodes can follow now:\n%s", len(unready), summary(chosen.unready))
	}
	if chosen.Max, err = ParseMax(spec.MaxUnavailable, len(ready)); err != nil {
		return chosen, fmt.Errorf("--max-unavailable: %w", err)
	}
	list, err := rollouts(nodes)
	chosen.ended = endedIDs(list)
	return chosen, err
}

// Start makes the nodes part of a new rollout, which c.Holder drives from then on: it is to
// call Drive. No label is set yet. With an error, nothing is left of it.
func (c *Client) Start(ctx context.Context, spec Spec) (*Rollout, error) {
	chosen, err := c.choose(ctx, spec)
	if err != nil {
		return nil, err
	}
	if len(chosen.unready) > 0 {
		c.notice("left out, because they cannot follow now: %s", summary(chosen.unready))
	}
	if err := c.claim(ctx, chosen.Params, chosen.nodes, chosen.ended, spec.PauseAfter); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUp)
		defer cancel()
		return nil, errors.Join(err, c.release(ctx, chosen.ID))
	}
	return c.Find(ctx, chosen.ID)
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
		Label: cmp.Or(s.Label, label), To: s.To, MIG: s.MIG, By: holder, Started: time.Now().UTC().Truncate(time.Second), Selector: s.Selector,
		Timeout: int(s.Timeout / time.Second), Domain: cmp.Or(s.Domain, "nvidia.com"), AllowIll: s.AllowIll,
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

// claim writes a Record to each of the nodes, to the first one with a Head before the others: two
// that want the same nodes meet there. The Head says Running when all are claimed.
func (c *Client) claim(ctx context.Context, params Params, nodes []Node, ended map[string]bool, pauseAt int) error {
	head := Head{ID: params.ID, Phase: Claiming, PauseAt: pauseAt, Holder: c.Holder, Renewed: time.Now().UTC()}
	first, found := Node{}, false
	var rest []Node
	for i, n := range nodes {
		var err error
		if first, found, err = c.claimOne(ctx, n, Record{Params: params, Place: Waiting}, &head, ended); err != nil {
			return err
		}
		if rest = nodes[i+1:]; found {
			break
		}
	}
	if !found {
		return errors.New("all of the nodes are gone")
	}
	var mutex sync.Mutex
	var problem error
	for done := 0; done < len(rest) && problem == nil; {
		part := rest[done:min(len(rest), done+4*atOnce)]
		each(part, func(i int, n Node) {
			record := Record{Params: params, Place: Waiting, Wave: (done + i + 1) / params.Max}
			if _, _, err := c.claimOne(ctx, n, record, nil, ended); err != nil {
				mutex.Lock()
				defer mutex.Unlock()
				problem = cmp.Or(problem, err)
			}
		})
		done += len(part)
		if time.Since(head.Renewed) > c.lease/3 && problem == nil {
			first, problem = c.writeHead(ctx, first, params.ID, nil, func(h *Head) error { return h.renew(c.Holder) })
			head.Renewed = time.Now()
		}
	}
	if problem == nil {
		_, problem = c.writeHead(ctx, first, params.ID, nil, func(h *Head) error {
			h.Phase = Running
			return h.renew(c.Holder)
		})
	}
	return problem
}

// claimOne writes the Record to the Node, unless it has another one of a rollout that has not ended.
// found is false where the Node is gone.
func (c *Client) claimOne(ctx context.Context, n Node, record Record, head *Head, ended map[string]bool) (now Node, found bool, err error) {
	for {
		if n.Record != nil && n.Record.ID == record.ID {
			return n, true, nil // The answer was lost.
		}
		if err := n.taken(ended); err != nil {
			return n, true, err
		}
		var p change
		record.From = n.label(record.Label)
		err := p.keep(RecordAnnotation, record)
		if head != nil {
			err = errors.Join(err, p.keep(HeadAnnotation, head))
		} else if n.Head != nil {
			err = errors.Join(err, p.keep(HeadAnnotation, nil))
		}
		if err != nil {
			return n, true, err
		}
		if now, err = c.patch(ctx, n, p); err == nil || !gone(err) {
			return now, true, err
		}
		if n, found, err = c.get(ctx, n.Name); err != nil || !found {
			return n, found, err
		}
	}
}

// each calls do for all nodes, some at once, and returns when all have ended.
func each(nodes []Node, do func(i int, n Node)) {
	var running sync.WaitGroup
	places := make(chan struct{}, atOnce)
	for i, n := range nodes {
		places <- struct{}{}
		running.Go(func() {
			do(i, n)
			<-places
		})
	}
	running.Wait()
}

// release takes the rollout's annotations from all nodes, from the one with the Head at last. Labels
// stay as they are.
func (c *Client) release(ctx context.Context, id string) error {
	nodes, err := c.nodes(ctx)
	if err != nil {
		return err
	}
	var mutex sync.Mutex
	var errs []error
	remove := func(_ int, n Node) {
		err := c.releaseOne(ctx, n, id)
		mutex.Lock()
		defer mutex.Unlock()
		errs = append(errs, err)
	}
	nodes = slices.DeleteFunc(nodes, func(n Node) bool {
		return (n.Record == nil || n.Record.ID != id) && (n.Head == nil || n.Head.ID != id)
	})
	isHead := func(n Node) bool { return n.Head != nil && n.Head.ID == id }
	each(slices.DeleteFunc(slices.Clone(nodes), isHead), remove)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("not all nodes were given back: %w", err)
	}
	for i, n := range nodes {
		if isHead(n) {
			remove(i, n)
		}
	}
	return errors.Join(errs...)
}

func (c *Client) releaseOne(ctx context.Context, n Node, id string) error {
	for {
		var p change
		if n.Record != nil && n.Record.ID == id {
			_ = p.keep(RecordAnnotation, nil) // Nothing to encode.
		}
		if n.Head != nil && n.Head.ID == id {
			_ = p.keep(HeadAnnotation, nil)
		}
		if p.annotations == nil {
			return nil
		}
		_, err := c.patch(ctx, n, p)
		if err == nil || !gone(err) {
			return err
		}
		found := false
		if n, found, err = c.get(ctx, n.Name); err != nil || !found {
			return err
		}
	}
}

// List has the rollouts that the nodes know of, the oldest first.
func (c *Client) List(ctx context.Context) ([]*Rollout, error) {
	nodes, err := c.nodes(ctx)
	if err != nil {
		return nil, err
	}
	return rollouts(nodes)
}

// Find is the rollout of that name.
func (c *Client) Find(ctx context.Context, id string) (*Rollout, error) {
	list, err := c.List(ctx)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(list, func(r *Rollout) bool { return r.ID == id }); i >= 0 {
		return list[i], nil
	}
	return nil, fmt.Errorf("no node knows of a rollout %s", id)
}

// Pause has the driver end: nothing is begun from then on. Who drives it sees that within a second.
func (c *Client) Pause(ctx context.Context, id string) error {
	r, err := c.Find(ctx, id)
	if err != nil {
		return err
	}
	_, err = c.writeHead(ctx, *r.headNode(), id, r.lostHead(), func(h *Head) error {
		if h.Phase != Running {
			return fmt.Errorf("rollout %s does not run: it is %s", id, h.Phase)
		}
		h.Phase, h.Reason = Paused, "by "+c.Holder
		return nil
	})
	return err
}

// Forget takes the annotations of a rollout away, so that it cannot be undone any more; labels stay
// as they are. One that has not ended is forgotten only if unfinished says so.
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
