package cluster

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"html/template"
	"io"
	"maps"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

//go:embed serve.html serve.css serve.js
var serveFiles embed.FS

const (
	// boardWidth is the width of a GPU's drawing, divisible by 4 and 8 slots. With more than
	// maxLines shares, the lines between them are omitted.
	boardWidth, maxLines = 96, 16
	// hueStep is the least difference between the colours of two namespaces, in degrees; some share
	// a colour.
	hueStep = 15
	// maxGone limits how many deleted nodes are remembered for open pages.
	maxGone = 1000
	// maxAnswers limits the requests answered at a time; others get 503.
	maxAnswers = 16
	// servePolicy forbids the browser everything except the page's own files.
	servePolicy = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src " +
		"'self'; script-src 'self'; connect-src 'self'"
)

// Page shows the cluster in a browser: nodes as tiles with their GPUs, and a page per node. It only
// reads. The server renders the tiles, and the page's script requests those that have changed. So
// there is one place that escapes text from outside.
type Page struct {
	latest    func() (*Snapshot, <-chan struct{})
	templates *template.Template
	answers   chan struct{}

	// mutex guards the fields below.
	mutex    sync.Mutex
	snapshot *Snapshot
	view     View
	// version counts snapshots from the start time on, so that versions of an earlier process are
	// not taken for this one's. Changes since oldest are known.
	version, oldest int64
	head            []byte
	tiles           map[string]*tile
	gone            []goneNode
}

// tile is a node as drawn, unchanged since version.
type tile struct {
	node    NodeView
	gpus    []GPUView
	html    []byte
	version int64
}

type goneNode struct {
	name    string
	version int64
}

// NewPage returns a page of the snapshots that latest returns; pass Watcher.Latest.
func NewPage(latest func() (*Snapshot, <-chan struct{})) *Page {
	p := &Page{
		latest:  latest,
		answers: make(chan struct{}, maxAnswers),
		tiles:   map[string]*tile{},
		version: time.Now().UnixMilli(),
	}
	p.templates = template.Must(template.New("").Funcs(template.FuncMap{
		"clock":   func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") + " UTC" },
		"count":   countText,
		"percent": status.PercentText,
		"bytes":   status.BytesText,
		"colour":  stateColour,
	}).ParseFS(serveFiles, "serve.html"))
	return p
}

// Serve answers below /secret/ on the listener, whose address must be loopback, until ctx ends.
func (p *Page) Serve(ctx context.Context, listener net.Listener, secret string) error {
	server := &http.Server{
		Handler:           p.Handler(secret),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      time.Minute,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(listener); ctx.Err() == nil {
		return err
	}
	return nil
}

// Handler answers GET and HEAD requests below /secret/, which other users of this machine do not
// know. It requires a request for localhost or a loopback address. Otherwise a site whose name points
// there could guess at this page (DNS rebinding).
func (p *Page) Handler(secret string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", p.showAll)
	mux.HandleFunc("GET /tiles", p.showTiles)
	mux.HandleFunc("GET /nodes/{name}", p.showNode)
	mux.HandleFunc("GET /api/v1/cluster", p.showJSON)
	mux.HandleFunc("GET /favicon.ico",
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	for name, kind := range map[string]string{
		"serve.css": "text/css; charset=utf-8",
		"serve.js":  "text/javascript; charset=utf-8",
	} {
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, r *http.Request) {
			data, _ := serveFiles.ReadFile(name)
			w.Header().Set("Content-Type", kind)
			send(w, r, data)
		})
	}
	known := http.StripPrefix("/"+secret, mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range map[string]string{
			"Content-Security-Policy":      servePolicy,
			"X-Content-Type-Options":       "nosniff",
			"Referrer-Policy":              "no-referrer",
			"Cross-Origin-Resource-Policy": "same-origin",
			"Cache-Control":                "no-store",
		} {
			w.Header().Set(name, value)
		}
		if !isLoopback(r.Host) {
			http.Error(w, "this address answers for localhost only", http.StatusMisdirectedRequest)
			return
		}
		given, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		if subtle.ConstantTimeCompare([]byte(given), []byte(secret)) != 1 {
			http.Error(w, "open the whole address that kubectl virgate --serve has printed", http.StatusForbidden)
			return
		}
		select {
		case p.answers <- struct{}{}:
			defer func() { <-p.answers }()
			known.ServeHTTP(w, r)
		default:
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests at a time", http.StatusServiceUnavailable)
		}
	})
}

func isLoopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// send writes the parts, compressed if the browser accepts it.
func send(w http.ResponseWriter, r *http.Request, parts ...[]byte) {
	w.Header().Set("Vary", "Accept-Encoding")
	var out io.Writer = w
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		packed, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
		defer func() { _ = packed.Close() }()
		out = packed
	}
	for _, part := range parts {
		if _, err := out.Write(part); err != nil {
			return
		}
	}
}

// update fetches the latest snapshot and redraws what has changed. The caller holds the mutex.
func (p *Page) update() {
	snapshot, _ := p.latest()
	if p.head != nil && snapshot == p.snapshot {
		return
	}
	p.version++
	p.snapshot = snapshot
	if snapshot != nil {
		p.view = NewView(*snapshot)
	}
	p.head = p.draw("head", newHeadView(p.view, p.version, snapshot != nil))
	if p.oldest == 0 {
		p.oldest = p.version
	}
	gpus := map[string][]GPUView{}
	for _, gpu := range p.view.GPUs {
		gpu.Use = nil // It changes all the time, and a tile does not show it.
		gpus[gpu.Node] = append(gpus[gpu.Node], gpu)
	}
	left := maps.Clone(p.tiles)
	for _, node := range p.view.Nodes {
		delete(left, node.Name)
		node.Heartbeat = nil
		old := p.tiles[node.Name]
		if old != nil && reflect.DeepEqual(old.node, node) && reflect.DeepEqual(old.gpus, gpus[node.Name]) {
			continue
		}
		html := p.draw("tile", newTileView(node, gpus[node.Name]))
		p.tiles[node.Name] = &tile{node, gpus[node.Name], html, p.version}
	}
	for name := range left {
		delete(p.tiles, name)
		p.gone = append(p.gone, goneNode{name, p.version})
	}
	if more := len(p.gone) - maxGone; more > 0 {
		p.oldest = p.gone[more-1].version
		p.gone = slices.Clone(p.gone[more:])
	}
}

// draw executes a template, and removes characters that a browser would interpret instead of show.
func (p *Page) draw(name string, data any) []byte {
	var buffer bytes.Buffer
	if err := p.templates.ExecuteTemplate(&buffer, name, data); err != nil {
		return []byte(template.HTMLEscapeString(err.Error()))
	}
	return []byte(status.Plain(buffer.String()))
}

// since returns the tiles that have changed after that version, and marks for deleted nodes. If
// whole is true, it returns all tiles, because the changes since that version are unknown.
func (p *Page) since(version int64) (parts [][]byte, whole bool) {
	whole = version < p.oldest || version > p.version
	for _, name := range slices.Sorted(maps.Keys(p.tiles)) {
		if t := p.tiles[name]; whole || t.version > version {
			parts = append(parts, t.html)
		}
	}
	for _, gone := range p.gone {
		if !whole && gone.version > version {
			parts = append(parts, p.draw("gone", gone.name))
		}
	}
	return parts, whole
}

func (p *Page) showAll(w http.ResponseWriter, r *http.Request) {
	p.mutex.Lock()
	p.update()
	parts, _ := p.since(-1)
	parts = append([][]byte{p.draw("top", nil), p.head, p.draw("middle", nil)}, parts...)
	parts = append(parts, p.draw("bottom", nil))
	p.mutex.Unlock()
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	send(w, r, parts...)
}

// showTiles answers with what has changed since the page's version, or 204.
func (p *Page) showTiles(w http.ResponseWriter, r *http.Request) {
	version, err := strconv.ParseInt(r.URL.Query().Get("since"), 10, 64)
	if err != nil {
		http.Error(w, "since: expected a version", http.StatusBadRequest)
		return
	}
	p.mutex.Lock()
	p.update()
	parts, whole := p.since(version)
	parts = append([][]byte{p.head}, parts...)
	now := p.version
	p.mutex.Unlock()
	if version == now {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Virgate-Whole", strconv.FormatBool(whole))
	send(w, r, parts...)
}

// showJSON answers with the whole View, for programs.
func (p *Page) showJSON(w http.ResponseWriter, r *http.Request) {
	p.mutex.Lock()
	p.update()
	view, ready := p.view, p.snapshot != nil
	tag := fmt.Sprintf(`"%d"`, p.version)
	p.mutex.Unlock()
	if !ready {
		http.Error(w, "nothing is read yet", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("ETag", tag)
	w.Header().Set("Cache-Control", "no-cache")
	if strings.TrimPrefix(r.Header.Get("If-None-Match"), "W/") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	data, err := json.Marshal(view)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	send(w, r, data)
}

// nodePage is a node's own page.
type nodePage struct {
	At    time.Time
	Notes []string
	Node  NodeView
	Tile  tileView
	GPUs  []GPUView
	// Virgate is its pod on the node, with its port.
	Virgate Pod
}

func (p *Page) showNode(w http.ResponseWriter, r *http.Request) {
	p.mutex.Lock()
	p.update()
	view, snapshot := p.view, p.snapshot
	p.mutex.Unlock()
	page := nodePage{At: view.At, Notes: view.Notes}
	i := slices.IndexFunc(view.Nodes, func(n NodeView) bool { return n.Name == r.PathValue("name") })
	if i < 0 {
		http.Error(w, "there is no such node here", http.StatusNotFound)
		return
	}
	page.Node = view.Nodes[i]
	for _, gpu := range view.GPUs {
		if gpu.Node == page.Node.Name {
			page.GPUs = append(page.GPUs, gpu)
		}
	}
	for _, pod := range snapshot.Pods {
		if pod.Node == page.Node.Name && pod.StatusPort > 0 {
			page.Virgate = pod
		}
	}
	page.Tile = newTileView(page.Node, page.GPUs)
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	send(w, r, p.draw("node", page))
}

// headView is the page's summary of all nodes.
type headView struct {
	View
	Version int64
	Ready   bool
	Totals  []ResourceView
	// States counts the nodes of each filter.
	States map[string]int
}

// newHeadView is pure.
func newHeadView(view View, version int64, ready bool) headView {
	head := headView{
		View:    view,
		Version: version,
		Ready:   ready,
		States:  map[string]int{},
	}
	totals := map[string]*ResourceView{}
	unhealthy := map[string]bool{}
	for _, gpu := range view.GPUs {
		unhealthy[gpu.Node] = unhealthy[gpu.Node] || mark(gpu) != ""
	}
	for _, node := range view.Nodes {
		for _, state := range filters(node, unhealthy[node.Name]) {
			head.States[state]++
		}
		for _, r := range node.Resources {
			t := totals[r.Name]
			if t == nil {
				t = &ResourceView{Name: r.Name}
				if r.Held != nil {
					t.Held, t.Free = new(int64), new(int64)
				}
				totals[r.Name] = t
			}
			t.Allocatable += r.Allocatable
			t.Unhealthy += r.Unhealthy
			if r.Held != nil && r.Free != nil && t.Held != nil {
				*t.Held += *r.Held
				*t.Free += *r.Free
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(totals)) {
		head.Totals = append(head.Totals, *totals[name])
	}
	return head
}

// filters returns the page's filters that match the node.
func filters(n NodeView, unhealthyGPU bool) (states []string) {
	unhealthy := func(r ResourceView) bool { return r.Unhealthy > 0 }
	if n.Problem != "" || unhealthyGPU || slices.ContainsFunc(n.Resources, unhealthy) {
		states = append(states, "unhealthy")
	}
	if n.State == nodereport.ProfilePending || n.State == nodereport.ProfileSwitching {
		states = append(states, "pending")
	}
	if n.State == nodereport.ProfileRejected {
		states = append(states, "rejected")
	}
	if slices.ContainsFunc(n.Resources, func(r ResourceView) bool { return r.Free != nil && *r.Free > 0 }) {
		states = append(states, "free")
	}
	return states
}

// tileView is a node as the page draws it.
type tileView struct {
	NodeView
	// Profile is the profile in force.
	Profile string
	// States and Find are what the filters match.
	States, Find string
	Boards       []board
}

// board is the drawing of a GPU, boardWidth wide: a box per partition, or one for the whole GPU.
type board struct {
	Label string
	Boxes []box
}

// box is a GPU or partition, with lines between its shares and a bar for each holder.
type box struct {
	X, Width float64
	// Text names it and its use, Mark is a sign for bad health.
	Text, Mark string
	Bars       []bar
	Lines      []float64
}

// MarkX is the middle of the box.
func (b box) MarkX() float64 { return b.X + b.Width/2 }

type bar struct {
	X, Width float64
	Text     string
	Hue      uint32
}

// newTileView is pure.
func newTileView(n NodeView, gpus []GPUView) tileView {
	v := tileView{NodeView: n, Profile: cmp.Or(n.Applied.Name, n.Applied.Generation)}
	find := map[string]bool{
		n.Name:          true,
		n.Wanted:        true,
		v.Profile:       true,
		n.Layout:        true,
		string(n.State): true,
	}
	for _, model := range n.Models {
		find[model] = true
	}
	for _, r := range n.Resources {
		find[r.Name] = true
	}
	unhealthy, last := false, "none"
	for _, gpu := range gpus {
		unhealthy = unhealthy || mark(gpu) != ""
		find[gpu.Profile] = true
		parent, _, _ := strings.Cut(gpu.Index, ":")
		if gpu.Placement == nil || parent != last {
			v.Boards = append(v.Boards, board{Label: parent})
		}
		last = parent
		of := &v.Boards[len(v.Boards)-1]
		of.Boxes = append(of.Boxes, newBox(gpu))
		for _, h := range gpu.Holders {
			find[h.String()] = true
		}
	}
	delete(find, "")
	v.Find = strings.ToLower(strings.Join(slices.Sorted(maps.Keys(find)), "\n"))
	v.States = strings.Join(filters(n, unhealthy), " ")
	return v
}

func newBox(gpu GPUView) box {
	b := box{Width: boardWidth, Mark: mark(gpu)}
	if p := gpu.Placement; p != nil && gpu.Slots > 0 {
		slot := float64(boardWidth) / float64(gpu.Slots)
		b.X, b.Width = float64(p.Start)*slot, float64(p.Size)*slot
	}
	shares := max(gpu.Replicas, gpu.Held, 1)
	share := b.Width / float64(shares)
	b.Text = strings.Join(strings.Fields(fmt.Sprintf("GPU %s %s %s: %s, %d of %d held %s %s",
		cmp.Or(gpu.Index, gpu.ID), gpu.Model, gpu.Profile, cmp.Or(gpu.Resource, "not offered"), gpu.Held, shares,
		gpu.Health, gpu.Reason)), " ")
	at := b.X
	for _, h := range gpu.Holders {
		hash := fnv.New32a()
		_, _ = hash.Write([]byte(h.Namespace))
		width := min(share*float64(h.Devices), b.X+b.Width-at)
		b.Bars = append(b.Bars, bar{
			at, max(0, width), fmt.Sprintf("%s: %d of %d shares of GPU %s", h, h.Devices, shares,
				cmp.Or(gpu.Index, gpu.ID)), hash.Sum32() % (360 / hueStep) * hueStep,
		})
		at += width
	}
	if shares <= maxLines {
		for i := 1; i < shares; i++ {
			b.Lines = append(b.Lines, b.X+float64(i)*share)
		}
	}
	return b
}

// mark returns a sign for bad health, so that it is not shown by colour alone.
func mark(gpu GPUView) string {
	switch {
	case strings.EqualFold(gpu.Health, string(sharing.Unhealthy)):
		return "✕"
	case gpu.Health == string(sharing.Suspect) || gpu.Health == string(sharing.Recovering):
		return "!"
	}
	return ""
}

func stateColour(state nodereport.ProfileState) string {
	switch state {
	case nodereport.ProfileApplied:
		return "good"
	case nodereport.ProfileRejected:
		return "bad"
	}
	return "warn"
}

func countText(n *int64) string {
	if n == nil {
		return "?"
	}
	return strconv.FormatInt(*n, 10)
}
