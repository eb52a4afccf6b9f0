package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"fmt"
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
	"github.com/virgate/virgate/internal/page"
)

//go:embed cluster.html cluster.js
var files embed.FS

const (
	// boardWidth is the width of a GPU's drawing, divisible by 4 and 8 slots.
	boardWidth = 96
	// maxGone limits how many deleted nodes are remembered for open pages.
	maxGone = 1000
	// maxAnswers limits the requests answered at a time; others get 503.
	maxAnswers = 16
)

// Page shows the cluster in a browser: nodes as tiles with their GPUs, and a page per node. It only
// reads. The server renders the tiles, and the page's script requests those that have changed. So
// there is one place that escapes text from outside.
type Page struct {
	latest    func() (*Snapshot, <-chan struct{})
	templates page.Templates

	// mutex guards the fields below.
	mutex    sync.Mutex
	snapshot *Snapshot
	view     View
	// colours keep a namespace's colour as long as the page is served.
	colours page.Colours
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
	text, _ := files.ReadFile("cluster.html")
	return &Page{
		latest:    latest,
		templates: page.NewTemplates(string(text)),
		colours:   page.Colours{},
		tiles:     map[string]*tile{},
		version:   time.Now().UnixMilli(),
	}
}

// Serve answers at the address, which must be a loopback address, until ctx ends. It tells the page's
// URL, which has a secret, because other users of this machine may connect, too.
func (p *Page) Serve(ctx context.Context, address string, tell func(url string)) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	if bound, ok := listener.Addr().(*net.TCPAddr); !ok || !bound.IP.IsLoopback() {
		_ = listener.Close()
		return fmt.Errorf("%q is %s here, which is no loopback address", address, listener.Addr())
	}
	secret := rand.Text()
	tell(fmt.Sprintf("http://%s/%s/", listener.Addr(), secret))
	server := page.NewServer(p.Handler(secret))
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(listener); ctx.Err() == nil {
		return err
	}
	return nil
}

// Handler answers GET and HEAD requests for localhost or a loopback address below /secret/, which other
// users of this machine do not know.
func (p *Page) Handler(secret string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", p.showAll)
	mux.HandleFunc("GET /tiles", p.showTiles)
	mux.HandleFunc("GET /nodes/{name}", p.showNode)
	mux.HandleFunc("GET /api/v1/cluster", p.showJSON)
	mux.HandleFunc("GET /favicon.ico",
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	page.ServeFiles(mux)
	page.ServeFile(mux, files, "cluster.js", "text/javascript")
	known := page.Limited(maxAnswers, http.StripPrefix("/"+secret, mux))
	return page.Secured(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !page.IsLoopback(r.Host) {
			http.Error(w, "this address answers for localhost only", http.StatusMisdirectedRequest)
			return
		}
		given, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		if subtle.ConstantTimeCompare([]byte(given), []byte(secret)) != 1 {
			http.Error(w, "open the whole address that was printed", http.StatusForbidden)
			return
		}
		known.ServeHTTP(w, r)
	}))
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
	p.head = p.templates.Draw("head", newHeadView(p.view, p.version, snapshot != nil, p.colours))
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
		if snapshot.Statuses[node.Name].Page == nil {
			node.Unread = cmp.Or(node.Unread, snapshot.StatusUnread)
		}
		old := p.tiles[node.Name]
		if old != nil && reflect.DeepEqual(old.node, node) && reflect.DeepEqual(old.gpus, gpus[node.Name]) {
			continue
		}
		html := p.templates.Draw("tile", newTileView(node, gpus[node.Name], p.colours))
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
			parts = append(parts, p.templates.Draw("gone", gone.name))
		}
	}
	return parts, whole
}

func (p *Page) showAll(w http.ResponseWriter, r *http.Request) {
	p.mutex.Lock()
	p.update()
	parts, _ := p.since(-1)
	parts = append([][]byte{p.templates.Draw("top", nil), p.head, p.templates.Draw("middle", nil)}, parts...)
	parts = append(parts, p.templates.Draw("bottom", nil))
	p.mutex.Unlock()
	page.SendHTML(w, r, parts...)
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
	w.Header().Set("Virgate-Whole", strconv.FormatBool(whole))
	page.SendHTML(w, r, parts...)
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
	page.Send(w, r, data)
}

// nodePage is a node's own page.
type nodePage struct {
	At    time.Time
	Notes []string
	Node  NodeView
	Tile  tileView
	// Status is the node's status page; nil if it was not read. Then GPUs has the units that pods hold.
	Status *page.Node
	GPUs   []GPUView
	// Virgate is its pod on the node, with its port.
	Virgate Pod
}

func (p *Page) showNode(w http.ResponseWriter, r *http.Request) {
	node, known := p.nodePage(r.PathValue("name"))
	if !known {
		http.Error(w, "there is no such node here", http.StatusNotFound)
		return
	}
	page.SendHTML(w, r, p.templates.Draw("cluster-node", node))
}

func (p *Page) nodePage(name string) (n nodePage, known bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.update()
	i := slices.IndexFunc(p.view.Nodes, func(n NodeView) bool { return n.Name == name })
	if i < 0 {
		return nodePage{}, false
	}
	n = nodePage{
		At:    p.view.At,
		Notes: p.view.Notes,
		Node:  p.view.Nodes[i],
	}
	for _, gpu := range p.view.GPUs {
		if gpu.Node == name {
			n.GPUs = append(n.GPUs, gpu)
		}
	}
	for _, pod := range p.snapshot.Pods {
		if pod.Node == name && pod.StatusPort > 0 {
			n.Virgate = pod
		}
	}
	n.Tile = newTileView(n.Node, n.GPUs, p.colours)
	if s := p.snapshot.Statuses[name].Page; s != nil {
		node := page.NewNode(*s, n.At, p.colours)
		node.Node = name
		n.Status = &node
	}
	return n, true
}

// headView is the page's summary of all nodes.
type headView struct {
	View
	Version int64
	Ready   bool
	Totals  []ResourceView
	// States counts the nodes of each filter.
	States map[string]int
	Legend []page.Colour
}

// newHeadView is pure.
func newHeadView(view View, version int64, ready bool, colours page.Colours) headView {
	head := headView{
		View:    view,
		Version: version,
		Ready:   ready,
		States:  map[string]int{},
	}
	used := page.Colours{}
	for _, tenant := range view.Tenants {
		if tenant.Units > 0 {
			used[tenant.Namespace] = colours.Of(tenant.Namespace)
		}
	}
	head.Legend = used.Legend()
	totals := map[string]*ResourceView{}
	unhealthy := map[string]bool{}
	for _, gpu := range view.GPUs {
		unhealthy[gpu.Node] = unhealthy[gpu.Node] || page.Mark(gpu.Health) != ""
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

// edge returns the class of a node's colour; "" if its state is not known.
func edge(state nodereport.ProfileState, states []string) string {
	switch {
	case slices.Contains(states, "unhealthy"), slices.Contains(states, "rejected"):
		return "bad-edge"
	case slices.Contains(states, "pending"):
		return "warn-edge"
	case state == nodereport.ProfileApplied:
		return "good-edge"
	}
	return ""
}

// tileView is a node as the page draws it.
type tileView struct {
	NodeView
	// Profile is the profile in force.
	Profile string
	// States and Find are what the filters match.
	States, Find string
	Boards       []page.Board
	// Edge is the class of its colour, by the worst of its states.
	Edge string
}

// newTileView is pure, except that it adds namespaces to the colours.
func newTileView(n NodeView, gpus []GPUView, colours page.Colours) tileView {
	v := tileView{NodeView: n, Profile: cmp.Or(n.Applied.Name, n.Applied.Generation)}
	if v.Unread == notYet {
		v.Unread = ""
	}
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
		unhealthy = unhealthy || page.Mark(gpu.Health) != ""
		find[gpu.Profile] = true
		parent, _, _ := strings.Cut(gpu.Index, ":")
		if gpu.Placement == nil || parent != last {
			v.Boards = append(v.Boards, page.Board{Label: parent, Width: boardWidth})
		}
		last = parent
		v.Boards[len(v.Boards)-1].Add(unitOf(gpu), colours)
		for _, h := range gpu.Holders {
			find[h.String()] = true
		}
	}
	delete(find, "")
	v.Find = strings.ToLower(strings.Join(slices.Sorted(maps.Keys(find)), "\n"))
	states := filters(n, unhealthy)
	v.States = strings.Join(states, " ")
	v.Edge = edge(n.State, states)
	return v
}

func unitOf(gpu GPUView) page.Unit {
	u := page.Unit{
		Index:     cmp.Or(gpu.Index, gpu.ID),
		Model:     gpu.Model,
		Profile:   gpu.Profile,
		Resource:  gpu.Resource,
		Placement: gpu.Placement,
		Slots:     gpu.Slots,
		Replicas:  gpu.Replicas,
		Held:      gpu.Held,
		Health:    gpu.Health,
		Reason:    gpu.Reason,
	}
	for _, h := range gpu.Holders {
		u.Shares = append(u.Shares, page.Share{
			Namespace: h.Namespace,
			Pod:       h.Pod,
			Devices:   h.Devices,
		})
	}
	return u
}
