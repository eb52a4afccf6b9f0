package web

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

//go:embed page.html
var pageText string

//go:embed page.css
var pageStyle string

// page shows a Status to people: one document that loads and runs nothing.
type page struct {
	template *template.Template
	// policy makes the browser forbid everything but the page's own style, so that a name with
	// markup in it does no harm.
	policy string
}

func newPage() page {
	hash := sha256.Sum256([]byte(pageStyle))
	return page{
		template: template.Must(template.New("page").Funcs(template.FuncMap{
			"bytes":     status.BytesText,
			"percent":   status.PercentText,
			"since":     sinceText,
			"number":    numberText,
			"share":     share,
			"cause":     causeText,
			"breakable": func(text string) []string { return strings.SplitAfter(text, ".") },
			"positive":  func(n *float64) bool { return n != nil && *n > 0 },
			//nolint:gosec // it is this program's own
			"style": func() template.CSS { return template.CSS(pageStyle) },
		}).Parse(pageText)),
		policy: "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src 'sha256-" +
			base64.StdEncoding.EncodeToString(hash[:]) + "'",
	}
}

func (p page) write(w http.ResponseWriter, node status.Status, now time.Time) {
	var buffer bytes.Buffer
	if err := p.template.Execute(&buffer, newPageView(node, now)); err != nil {
		http.Error(w, "the page cannot be made: "+err.Error(), http.StatusInternalServerError)
		return
	}
	header := w.Header()
	header.Set("Content-Type", "text/html; charset=utf-8")
	header.Set("Content-Security-Policy", p.policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cache-Control", "no-store")
	_, _ = io.WriteString(w, status.Plain(buffer.String()))
}

func (s *Server) showPage() http.HandlerFunc {
	// Parsed at the first request, because parsing it earlier would delay the start.
	p := sync.OnceValue(newPage)
	return func(w http.ResponseWriter, r *http.Request) { p().write(w, s.Node.Status(r.Context()), time.Now()) }
}

// pageView is a Status as the page draws it.
type pageView struct {
	status.Status
	Now time.Time
	// Reasons are why the node is not ready, without the reasons that the page shows elsewhere.
	Reasons []string
	// Waiting is what a switch waits for.
	Waiting []string
	GPUs    []gpuView
	Changes []changeView
}

type gpuView struct {
	status.GPU
	// Slots is the number of memory slots that its partitions are in; 0 without partitions.
	Slots int
	// Layout is how far the GPU has come with its MIG layout; nil if none is wanted.
	Layout *nodereport.GPULayout
	Blocks []blockView
}

// blockView is a unit with a cell for each of its devices, starting with the busiest holder.
type blockView struct {
	status.Unit
	// Cells have the pods that hold the devices; empty for a free device.
	Cells []string
	// More is the number of devices without a cell.
	More int
}

// changeView is a change of the profile or of a unit's health.
type changeView struct {
	At         time.Time
	What, Text string
}

const (
	// maxCells limits the cells of a unit, and maxChanges the changes that are shown.
	maxCells, maxChanges = 48, 10
)

// newPageView is pure.
func newPageView(node status.Status, now time.Time) pageView {
	view := pageView{
		Status:  node,
		Now:     now,
		Changes: changesOf(node),
		Waiting: nodereport.Waiting(node.Layouts, node.Waits),
	}
	for _, reason := range node.Unready {
		if node.Profile.Error == "" || !strings.HasSuffix(reason, node.Profile.Error) {
			view.Reasons = append(view.Reasons, reason)
		}
	}
	for _, g := range node.GPUs {
		gpu := gpuView{GPU: g, Slots: status.Slots(g)}
		if i := slices.IndexFunc(node.Layouts, func(l nodereport.GPULayout) bool { return l.GPU == g.UUID }); i >= 0 {
			gpu.Layout = &node.Layouts[i]
			if gpu.Slots > 0 && gpu.Layout.Slots > 0 {
				gpu.Slots = gpu.Layout.Slots
			}
		}
		for _, u := range g.Units {
			gpu.Blocks = append(gpu.Blocks, newBlockView(u))
		}
		view.GPUs = append(view.GPUs, gpu)
	}
	return view
}

func newBlockView(u status.Unit) blockView {
	block := blockView{Unit: u}
	block.Holders = slices.Clone(u.Holders)
	slices.SortStableFunc(block.Holders, busiestFirst)
	total := max(u.Replicas, u.Held())
	var held []string
	for _, holder := range block.Holders {
		held = append(held, slices.Repeat([]string{holder.Namespace + "/" + holder.Pod}, len(holder.Devices))...)
	}
	block.Cells = make([]string, min(total, maxCells))
	copy(block.Cells, held)
	block.More = total - len(block.Cells)
	return block
}

// busiestFirst sorts holders by how much they compute, then by their use of memory.
func busiestFirst(a, b status.Holder) int {
	load := func(h status.Holder) (sm, memory float64) {
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
func changesOf(node status.Status) []changeView {
	var changes []changeView
	if p := node.Profile; !p.Since.IsZero() {
		changes = append(changes, changeView{
			p.Since, "profile", strings.TrimSpace(p.Wanted.Name + " " + string(p.State)),
		})
	}
	unit := func(name string, h status.Health) {
		if h.Since != nil && h.Reason != "" {
			changes = append(changes, changeView{*h.Since, name, string(h.State) + ": " + h.Reason})
		}
	}
	for _, g := range node.GPUs {
		unit(fmt.Sprintf("GPU %d", g.Index), g.Health)
		for _, u := range g.Units {
			if u.ID != g.UUID {
				unit("partition "+u.Index, u.Health)
			}
		}
	}
	slices.SortStableFunc(changes, func(a, b changeView) int {
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

// causeText returns why processes belong to no holder.
func causeText(cause sharing.UnattributedCause) string {
	return cmp.Or(map[sharing.UnattributedCause]string{
		sharing.CauseNoContainer:  "in no container",
		sharing.CauseNotAllocated: "in containers that hold no device of it",
		sharing.CauseMPSServer:    "of an MPS server",
		sharing.CauseUnreadable:   "that could not be looked at",
	}[cause], string(cause))
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
