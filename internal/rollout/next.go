package rollout

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodereport"
)

const (
	// settle is how long a node may still report its old state. Virgate sees a label within a
	// second, and reports the result within two.
	settle = 5 * time.Second
	// unchanged is how long a refusal is ignored that reads exactly as before the label was set.
	// After that it counts for the new profile: the same refusal again would not be reported anew.
	unchanged = 30 * time.Second
	// leaving is how long devices of the previous profile may stay listed and not allocatable after
	// the new profile is applied.
	leaving = 2 * time.Minute
)

// Write is a change of one Node in one patch.
type Write struct {
	Node   Node
	Record Record
	// SetLabel sets the label to Label, or removes it if Label is nil.
	SetLabel bool
	Label    *string
}

// Next returns what to do now, and the phase that follows once nothing is left to write. It is
// called again when a node has changed and when time has passed.
func Next(r *Rollout, now time.Time, unmake bool) (writes []Write, phase Phase, reason string) {
	switch r.Phase {
	case Running:
		return r.forward(now)
	case TakingBack:
		return r.backward(now, unmake)
	}
	return nil, r.Phase, r.Reason
}

// forward judges all nodes first, and sets further labels only if no node is in the way.
func (r *Rollout) forward(now time.Time) (writes []Write, phase Phase, reason string) {
	var stops []string
	underWay, doubts := 0, 0
	for _, n := range r.Nodes {
		record := *n.Record
		record.AllowUnhealthy = r.AllowUnhealthy || r.IgnoreUnhealthy
		next, doubt := record.judge(n, now)
		if doubt {
			doubts++
		}
		if next != record {
			writes = append(writes, Write{Node: n, Record: next})
		}
		if next.State == Pending || record.State == Pending { // Until the new state is written.
			underWay++
		}
		if next.State == Failed {
			stops = append(stops, n.Name+": "+next.Reason)
		}
	}
	if len(stops) > 0 {
		return writes, Stopped, summary(stops)
	}
	paused, away := 0, []string{}
	for _, n := range r.Nodes {
		switch {
		case n.Record.State != Waiting:
		case r.PauseAt > 0 && n.Record.Wave >= r.PauseAt:
			paused++
		case n.NotReady != "":
			away = append(away, n.Name+": "+n.NotReady) // Other nodes come first.
		case underWay < r.Max && doubts == 0:
			underWay++
			writes = append(writes, n.set(&r.To, Pending, now))
		default:
			return writes, Running, ""
		}
	}
	switch {
	case underWay > 0 || doubts > 0:
		return writes, Running, ""
	case len(away) > 0:
		return writes, Stopped, summary(away)
	case paused > 0:
		return writes, Paused, fmt.Sprintf("after wave %d, as it was asked to", r.PauseAt)
	}
	return writes, Finished, ""
}

// set returns the write that gives the node a label.
func (n Node) set(label *string, state NodeState, now time.Time) Write {
	record := *n.Record
	record.State = state
	record.Reason = ""
	record.Set = true
	record.Trusted = false
	record.Since = now
	record.Applied = time.Time{}
	record.Before = n.reported()
	return Write{
		Node:     n,
		Record:   record,
		SetLabel: true,
		Label:    label,
	}
}

// judge updates the Record from what the node reports. If doubt is true, a node that seems done or
// seems to refuse may still report its old state, and no other label is set meanwhile.
func (r Record) judge(n Node, now time.Time) (next Record, doubt bool) {
	next = r
	fail := func(format string, arguments ...any) (Record, bool) {
		next.State, next.Reason = Failed, fmt.Sprintf(format, arguments...)
		return next, false
	}
	is := n.label(r.Label)
	should := &r.To
	if r.State == Waiting {
		should = r.From
	}
	if r.State != Failed && r.State != Skipped && !same(is, should) {
		return fail("someone else changed its label %s: it is %s and was %s", r.Label, value(is), value(should))
	}
	reported, took := n.reported(), now.Sub(r.Since)
	switch r.State {
	case Pending:
		if refuses(reported, r.MIG) {
			switch {
			case took < settle || reported == r.Before && took < unchanged:
				return next, true
			case reported == r.Before:
				return fail("the node says the same as before its label was set: %s", n.Says())
			}
			return fail("%s", n.refusal())
		}
		if r.MIG && r.Before.Layout == "success" && reported.Layout != "success" {
			next.Before.Layout = reported.Layout // So that the next success is known to be new.
		}
		switch {
		case !r.follows(n, reported, took):
			next.Applied = time.Time{}
		case !r.AllowUnhealthy && reported.Unhealthy > r.Before.Unhealthy:
			if next.Applied.IsZero() {
				next.Applied = now
			}
			if now.Sub(next.Applied) >= leaving {
				return fail("a new fault: %d devices cannot be given out, %d before",
					reported.Unhealthy, r.Before.Unhealthy)
			}
		default:
			next.State = Done
			next.Trusted = true
			next.Unhealthy = reported.Unhealthy
			next.Reason = ""
			next.Applied = time.Time{}
			return next, false
		}
		if took >= time.Duration(r.Timeout)*time.Second {
			return fail("not done within %s: %s", time.Duration(r.Timeout)*time.Second, n.Says())
		}
	case Done:
		switch {
		case refuses(reported, r.MIG):
			return fail("%s", n.refusal())
		case n.Condition.Status == corev1.ConditionFalse:
			return fail("a new fault: %s", n.Says())
		case !r.AllowUnhealthy && reported.Unhealthy > r.Unhealthy:
			return fail("a new fault: %d devices cannot be given out, %d before", reported.Unhealthy, r.Unhealthy)
		case !r.follows(n, reported, took):
			next.State = Pending
			next.Since = now
			next.Reason = "was done, and then: " + n.Says()
		default:
			next.Unhealthy = reported.Unhealthy
		}
	}
	return next, false
}

// follows reports whether the node has what the label names, and its report cannot be an old one.
// For a profile, the annotation names it. For a layout, the generation must differ, or its success
// must have been absent since.
func (r Record) follows(n Node, reported Reported, took time.Duration) bool {
	if n.NotReady != "" || n.Condition.Type != "" && n.Condition.Status != corev1.ConditionTrue {
		return false
	}
	found := r.Trusted || same(r.From, &r.To)
	if r.MIG {
		other := reported.Generation != r.Before.Generation || r.Before.Layout != "success"
		applied := reported.State == "" || reported.State == string(nodereport.ProfileApplied)
		return reported.Layout == "success" && applied && (found || other)
	}
	// The condition is written separately from the annotations, a moment earlier or later.
	other := (reported.State != r.Before.State || reported.Profile != r.Before.Profile) &&
		reported.Heartbeat != r.Before.Heartbeat
	applied := reported.State == string(nodereport.ProfileApplied)
	return applied && reported.Profile == r.To && (found || other || took >= settle)
}

func refuses(reported Reported, layouts bool) bool {
	return reported.State == string(nodereport.ProfileRejected) || layouts && reported.Layout == "failed"
}

func (n Node) refusal() string {
	if n.State != string(nodereport.ProfileRejected) {
		return "the node refuses the layout: " + n.Says()
	}
	return "the node refuses the profile: " + n.Says()
}

// Says describes the node's state for people.
func (n Node) Says() string {
	texts := []string{n.NotReady}
	if n.Condition.Status == corev1.ConditionTrue || n.Condition.Type == "" {
		state := "it says nothing of a profile"
		if n.State != "" {
			state = fmt.Sprintf("it says %s, with profile %s in force", n.State, cmp.Or(n.Applied, "(without a name)"))
		}
		if n.LayoutState != "" {
			state += ", layout " + n.LayoutState
		}
		texts = append(texts, state)
	}
	if n.Condition.Message != "" {
		texts = append(texts, n.Condition.Reason+": "+n.Condition.Message)
	}
	text := oneLine(strings.Join(slices.DeleteFunc(texts, func(t string) bool { return t == "" }), "; "))
	if runes := []rune(text); len(runes) > 300 {
		text = string(runes[:300]) + "…"
	}
	return text
}

// backward restores labels that still have the rollout's value. No node stops it: one that does not
// follow gets its label back all the same.
func (r *Rollout) backward(now time.Time, atOnce bool) (writes []Write, phase Phase, reason string) {
	underWay := 0
	left := 0
	open := false
	for _, n := range r.Nodes {
		record := *n.Record
		switch record.State {
		case Pending:
			underWay++ // With or without its old label.
		case Undoing:
			record = record.judgeBack(n, now, atOnce)
			if record != *n.Record {
				writes = append(writes, Write{Node: n, Record: record})
			}
			underWay, open = underWay+1, true // Until the new state is written.
		}
		if record.State == Left {
			left++
		}
	}
	for _, n := range r.Nodes {
		if !n.Record.toUndo() {
			continue
		}
		is, record := n.label(r.Label), *n.Record
		switch {
		case same(is, record.From): // It had this label before, too.
			record.State, record.Reason = Undone, ""
			writes = append(writes, Write{Node: n, Record: record})
		case !same(is, &r.To):
			record.State, record.Reason = Left,
				fmt.Sprintf("someone else changed its label %s to %s", r.Label, value(is))
			writes, left = append(writes, Write{Node: n, Record: record}), left+1
		case atOnce || record.State == Failed || record.State == Skipped:
			write := n.set(record.From, Undone, now)
			write.Record.Reason = "its label is back; it was not waited for"
			writes = append(writes, write)
		case record.State == Pending || underWay < r.Max:
			if record.State != Pending {
				underWay++
			}
			writes, open = append(writes, n.set(record.From, Undoing, now)), true
		default:
			open = true
		}
	}
	if open {
		return writes, TakingBack, ""
	}
	if left > 0 {
		reason = fmt.Sprintf("%d nodes have another label by now and were left alone", left)
	}
	return writes, TakenBack, reason
}

// judgeBack updates the Record of a node whose label was restored.
func (r Record) judgeBack(n Node, now time.Time, atOnce bool) Record {
	reported, took := n.reported(), now.Sub(r.Since)
	applied := reported.State == string(nodereport.ProfileApplied)
	well := n.NotReady == "" && n.Condition.Status != corev1.ConditionFalse
	switch is := n.label(r.Label); {
	case !same(is, r.From):
		r.State, r.Reason = Left, fmt.Sprintf("someone else changed its label %s to %s", r.Label, value(is))
	case atOnce || took >= time.Duration(r.Timeout)*time.Second:
		r.State, r.Reason = Undone, "its label is back, and then: "+n.Says()
	case refuses(reported, r.MIG) && took >= unchanged: // Perhaps it refused this before, too.
		r.State, r.Reason = Undone, "its label is back; "+n.refusal()
	case !well || !applied && reported.State != "" || r.MIG && reported.Layout != "success" && reported.Layout != "":
	case !r.MIG && r.From != nil && reported.Profile != *r.From: // It has not followed yet.
	case reported.Profile != r.Before.Profile || reported.Generation != r.Before.Generation,
		took >= settle && !r.MIG && r.From != nil, took >= unchanged:
		r.State = Undone
	}
	return r
}

func same(a, b *string) bool {
	return a == nil && b == nil || a != nil && b != nil && *a == *b
}

func value(label *string) string {
	if label == nil {
		return "not there"
	}
	return fmt.Sprintf("%q", *label)
}

// oneLine limits a text that a node can influence to one line and 600 characters, to keep the
// ConfigMap small.
func oneLine(text string) string {
	const longest = 600
	line := []rune(strings.Join(strings.Fields(text), " "))
	if len(line) > longest {
		return string(line[:longest]) + "…"
	}
	return string(line)
}

// summary returns the first five reasons, one per line, and how many more there are.
func summary(reasons []string) string {
	const most = 5
	var lines []string
	for _, reason := range reasons[:min(most, len(reasons))] {
		lines = append(lines, oneLine(reason))
	}
	text := strings.Join(lines, "\n")
	if more := len(reasons) - most; more > 0 {
		text += fmt.Sprintf("\nand %d more", more)
	}
	return text
}
