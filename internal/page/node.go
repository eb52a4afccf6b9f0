package page

import (
	"cmp"
	"fmt"
	"html/template"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// functions are what the templates may call.
func functions() template.FuncMap {
	return template.FuncMap{
		"bytes":    status.BytesText,
		"percent":  status.PercentText,
		"since":    sinceText,
		"clock":    func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") + " UTC" },
		"number":   numberText,
		"share":    share,
		"words":    words,
		"xids":     splitXIDs,
		"runbook":  func() string { return runbook },
		"colour":   colourOf,
		"lower":    strings.ToLower,
		"positive": func(n *float64) bool { return n != nil && *n > 0 },
		"count": func(n *int64) string {
			if n == nil {
				return "?"
			}
			return strconv.FormatInt(*n, 10)
		},
	}
}

// runbook is what to do about a GPU with an XID. The alert of the chart names it too.
const runbook = "https://github.com/virgate/virgate/blob/main/docs/reference/runbook.md#virgategpuunhealthy"

// Node is the status of a node as its page draws it.
type Node struct {
	status.Status
	Now time.Time
	// Reasons are why the node is not ready, without the reasons that the page shows elsewhere.
	Reasons []string
	// Waiting is what a switch waits for.
	Waiting   []string
	Resources []resource
	GPUs      []gpu
	// Elsewhere are held units that are not on the node any more.
	Elsewhere []unit
	Changes   []change
	Legend    []Colour
}

// Colour is a namespace with the hue of its bars.
type Colour struct {
	Namespace string
	Hue       int
}

// Legend returns the colours by namespace.
func (c Colours) Legend() (legend []Colour) {
	for _, name := range slices.Sorted(maps.Keys(c)) {
		legend = append(legend, Colour{name, c[name]})
	}
	return legend
}

type resource struct {
	status.Resource
	// Unhealthy counts devices, UnhealthyHeld those of them that containers hold.
	Unhealthy, UnhealthyHeld int
}

type gpu struct {
	status.GPU
	// Slots is the number of memory slots that its partitions are in; 0 without partitions.
	Slots int
	// Layout is how far the GPU has come with its MIG layout; nil if none is wanted.
	Layout *nodereport.GPULayout
	Board  Board
	Units  []unit
}

// unit is a unit with its holders, starting with the busiest.
type unit struct {
	status.Unit
	Holders []holder
}

type holder struct {
	status.Holder
	Hue int
}

// change is a change of the profile or of a unit's health.
type change struct {
	At         time.Time
	What, Text string
}

const (
	// boardWidth is the width of a GPU's drawing; its height is 30.
	boardWidth = 400
	// maxChanges limits the changes that are shown.
	maxChanges = 10
)

// NewNode is pure, except that it adds the node's namespaces to the colours.
func NewNode(s status.Status, now time.Time, colours Colours) Node {
	node := Node{
		Status:  s,
		Now:     now,
		Changes: changesOf(s),
		Waiting: nodereport.Waiting(s.Layouts, s.Waits),
	}
	for _, reason := range s.Unready {
		if s.Profile.Error == "" || !strings.HasSuffix(reason, s.Profile.Error) {
			node.Reasons = append(node.Reasons, reason)
		}
	}
	for _, r := range s.Resources {
		node.Resources = append(node.Resources, newResource(r))
	}
	used := Colours{}
	for _, name := range namespacesOf(s) {
		used[name] = colours.Of(name)
	}
	for _, g := range s.GPUs {
		node.GPUs = append(node.GPUs, newGPU(g, s.Layouts, used))
	}
	for _, u := range s.Elsewhere {
		node.Elsewhere = append(node.Elsewhere, newUnit(u, used))
	}
	node.Legend = used.Legend()
	return node
}

// namespacesOf returns the namespaces of all holders, sorted.
func namespacesOf(s status.Status) []string {
	names := map[string]bool{}
	add := func(units []status.Unit) {
		for _, u := range units {
			for _, h := range u.Holders {
				names[h.Namespace] = true
			}
		}
	}
	add(s.Elsewhere)
	for _, g := range s.GPUs {
		add(g.Units)
	}
	return slices.Sorted(maps.Keys(names))
}

func newGPU(g status.GPU, layouts []nodereport.GPULayout, colours Colours) gpu {
	view := gpu{
		GPU:   g,
		Slots: status.Slots(g),
		Board: Board{Label: strconv.Itoa(g.Index), Width: boardWidth},
	}
	if i := slices.IndexFunc(layouts, func(l nodereport.GPULayout) bool { return l.GPU == g.UUID }); i >= 0 {
		view.Layout = &layouts[i]
		if view.Slots > 0 && view.Layout.Slots > 0 {
			view.Slots = view.Layout.Slots
		}
	}
	for _, u := range g.Units {
		view.Units = append(view.Units, newUnit(u, colours))
		if view.Slots > 0 && u.Placement == nil {
			continue // Its partitions take its place.
		}
		drawn := Unit{
			Index:     cmp.Or(u.Index, u.ID),
			Model:     g.Model,
			Profile:   u.Profile,
			Resource:  u.Resource,
			Placement: u.Placement,
			Slots:     view.Slots,
			Replicas:  u.Replicas,
			Held:      u.Held(),
			Health:    string(u.Health.State),
			Reason:    u.Health.Reason,
		}
		for _, h := range u.Holders {
			drawn.Shares = append(drawn.Shares, Share{h.Namespace, h.Pod, len(h.Devices)})
		}
		view.Board.Add(drawn, colours)
	}
	return view
}

func newUnit(u status.Unit, colours Colours) unit {
	view := unit{Unit: u}
	for _, h := range u.Holders {
		view.Holders = append(view.Holders, holder{h, colours.Of(h.Namespace)})
	}
	slices.SortStableFunc(view.Holders, busiestFirst)
	return view
}

// newResource counts the unhealthy devices, and those among them that a pod holds: Devices is Held, Free,
// and the unhealthy devices without a holder.
func newResource(r status.Resource) resource {
	view := resource{Resource: r, Unhealthy: r.Devices - r.Healthy}
	if r.Held != nil && r.Free != nil {
		view.UnhealthyHeld = min(view.Unhealthy, max(0, view.Unhealthy+*r.Held+*r.Free-r.Devices))
	}
	return view
}

// busiestFirst sorts holders by how much they compute, then by their use of memory.
func busiestFirst(a, b holder) int {
	load := func(h holder) (sm, memory float64) {
		if h.Use != nil {
			sm, _ = status.NumberOf(h.Use.SM)
			memory, _ = status.NumberOf(h.Use.Memory)
		}
		return sm, memory
	}
	smA, memoryA := load(a)
	smB, memoryB := load(b)
	return cmp.Or(cmp.Compare(smB, smA), cmp.Compare(memoryB, memoryA))
}

// changesOf returns the changes that the status has, latest first.
func changesOf(s status.Status) []change {
	var changes []change
	if p := s.Profile; !p.Since.IsZero() {
		changes = append(changes, change{
			p.Since, "profile", strings.TrimSpace(p.Wanted.Name + " " + string(p.State)),
		})
	}
	add := func(name string, h status.Health) {
		if h.Since != nil && h.Reason != "" {
			changes = append(changes, change{*h.Since, name, string(h.State) + ": " + h.Reason})
		}
	}
	for _, g := range s.GPUs {
		add(fmt.Sprintf("GPU %d", g.Index), g.Health)
		for _, u := range g.Units {
			if u.ID != g.UUID {
				add("partition "+u.Index, u.Health)
			}
		}
	}
	slices.SortStableFunc(changes, func(a, b change) int {
		return cmp.Or(b.At.Compare(a.At), strings.Compare(a.What, b.What))
	})
	return changes[:min(len(changes), maxChanges)]
}

// share returns the part's ratio to the whole, 0 to 1, in the form that <meter> needs.
func share(part *float64, whole uint64) string {
	if part == nil || whole == 0 {
		return "0"
	}
	return numberText(min(1, *part/float64(whole)))
}

// numberText returns a number without an exponent, 0 for an unknown one.
func numberText(n any) string {
	value, _ := status.NumberOf(n)
	return strconv.FormatFloat(value, 'f', -1, 64)
}

// words returns what people call a value that programs know by one word. The names of refusals are
// explained in docs/reference/runbook.md.
func words(value any) string {
	name := fmt.Sprint(value)
	return cmp.Or(map[any]string{
		plugin.UnknownDevice:      "unknown device",
		plugin.UnhealthyDevice:    "unhealthy device",
		plugin.TooMany:            "more than one share",
		plugin.SameUnit:           "shares of one GPU",
		plugin.SeveralUnits:       "shares of several GPUs",
		plugin.NotReady:           "the node lacks what the grant needs",
		plugin.MIGChange:          "the MIG layout was changing",
		plugin.Switching:          "the profile was changing",
		plugin.ByDRA:              "DRA offers it",
		plugin.Internal:           "impossible request",
		sharing.CauseNoContainer:  "in no container",
		sharing.CauseNotAllocated: "in containers that hold no device of it",
		sharing.CauseMPSServer:    "of an MPS server",
		sharing.CauseUnreadable:   "that could not be looked at",
		sharing.ThrottleHardware:  "the hardware protects itself",
		units.DRA:                 "by DRA alone",
		units.LeavingDRA:          "leaves DRA when its claims end",
		units.LeavingPlugin:       "goes to DRA when its pods end",
	}[value], strings.NewReplacer("_", " ", "-", " ").Replace(name))
}

// part is a part of a text, which may name an XID.
type part struct {
	Text  string
	IsXID bool
}

var xid = regexp.MustCompile(`\bXID \d+`)

// splitXIDs splits a text at the XIDs that it names.
func splitXIDs(text string) (parts []part) {
	at := 0
	for _, found := range xid.FindAllStringIndex(text, -1) {
		parts = append(parts, part{Text: text[at:found[0]]}, part{text[found[0]:found[1]], true})
		at = found[1]
	}
	return append(parts, part{Text: text[at:]})
}

// colourOf returns the class of a state's colour.
func colourOf(state any) string {
	switch fmt.Sprint(state) {
	case string(nodereport.ProfileApplied), string(sharing.Healthy):
		return "good"
	case string(nodereport.ProfileRejected), string(sharing.Unhealthy), string(nodereport.LayoutFailed):
		return "bad"
	}
	return "warn"
}

// sinceText returns how long ago something was, in its largest unit.
func sinceText(now, then time.Time) string {
	ago := now.Sub(then)
	switch {
	case ago < time.Second:
		return "now"
	case ago < time.Minute:
		return fmt.Sprintf("%d s ago", ago/time.Second)
	case ago < time.Hour:
		return fmt.Sprintf("%d min ago", ago/time.Minute)
	case ago < 48*time.Hour:
		return fmt.Sprintf("%d h ago", ago/time.Hour)
	default:
		return fmt.Sprintf("%d days ago", ago/(24*time.Hour))
	}
}
