// Package host looks at what a node's file system has for containers: the driver's
// device nodes, those of partitions among them, the driver that an installer brings,
// and the CDI specs. The result is a plugin.Host.
//
// The package itself only reads. It has specs written by a Specs, and missing device nodes
// made by a NodeMaker. It does not call the driver: the GPUs come from the
// inventory. Read host.go first, then files.go.
package host

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Specs keeps the node's CDI specs. A Host calls it from one goroutine.
type Specs interface {
	// Write makes sure that the specs have entries for the GPUs and for the extra
	// classes, and returns the qualified names of all entries that a container runtime
	// finds. It writes only what has changed. The error says what could not be done;
	// names are valid with an error too. It may call the driver and block.
	Write(ctx context.Context, gpus []sharing.GPU, extras []string) (names []string, err error)
}

// NodeMaker makes the device nodes of capabilities. A Host calls it from one goroutine.
type NodeMaker interface {
	// MakeNodes has NVIDIA's program make the nodes of the driver's files of these paths, such as
	// "/proc/driver/nvidia/capabilities/gpu0/mig/gi7/access", in the dev that containers are given
	// nodes of. What was not made is looked for afterwards. It may block until ctx ends.
	MakeNodes(ctx context.Context, files []string) error
}

// Options are a Host's settings.
type Options struct {
	// Root is where the host's "/" is mounted for this process; empty for "/".
	Root string
	// DevRoot is the host's folder with the driver's dev; empty for "/".
	DevRoot string
	// Dev is where that folder is mounted for this process; empty for where it is below Root, and
	// for nowhere if Root is "/", because a container's own dev has fewer nodes than the host's.
	Dev string
	// Capabilities tell the nodes of partitions.
	Capabilities migcaps.Reader
	// Maker makes missing nodes; nil where this program may not.
	Maker NodeMaker
	// Specs keeps the CDI specs; nil if they cannot be made.
	Specs Specs
	// Interval is the time between two checks of the files; 1 s when zero.
	Interval time.Duration
	// PrepareTimeout is how long Prepare waits for new CDI specs; 2 s when zero.
	PrepareTimeout time.Duration
	Logger         *slog.Logger
}

// Host knows what a node's file system has for grants, and has CDI specs written.
type Host struct {
	options Options
	log     *slog.Logger
	// wake has Watch write the specs of a new request.
	wake chan struct{}
	// ended is closed when Watch ends; no specs are written after that.
	ended chan struct{}
	// specsLate says that the last Prepare has not waited for its specs to the end, so
	// the next ones need not wait at all.
	specsLate atomic.Bool

	// request is the last one, nil before it.
	request atomic.Pointer[request]

	mu       sync.Mutex
	prepared plugin.Host
	entries  entries
	// notMade says why NVIDIA's program could not make the nodes that are missing; empty if it was
	// not asked, or says that it could.
	notMade string
	// warned has the texts that were logged.
	warned map[string]bool

	// maker is for Watch alone.
	maker struct {
		// asked are the files that the program was last asked for.
		asked []string
		// again is when it may be asked for the same ones again.
		again time.Time
	}
}

// request is what a plan needs.
type request struct {
	grants sharing.Grants
	gpus   []sharing.GPU
	// done is closed when its specs are written or could not be.
	done chan struct{}
}

// New returns a Host that has read nothing yet.
func New(options Options) *Host {
	options.Interval = cmp.Or(options.Interval, time.Second)
	options.PrepareTimeout = cmp.Or(options.PrepareTimeout, 2*time.Second)
	if filepath.Join("/", options.Root) != "/" {
		options.Dev = filepath.Join(options.Root, options.DevRoot)
	}
	return &Host{
		options: options,
		log:     options.Logger.With("component", "host"),
		wake:    make(chan struct{}, 1),
		ended:   make(chan struct{}),
		warned:  map[string]bool{},
	}
}

// Prepare returns what the node has for the plan's grants. Watch writes the CDI specs
// of new GPUs and has missing device nodes made, for which Prepare waits at most
// Options.PrepareTimeout, and no longer than Watch runs; a unit that lacks its entry or its
// nodes by then has an obstacle. The result must not be changed.
func (h *Host) Prepare(grants sharing.Grants, gpus []sharing.GPU) plugin.Host {
	r := &request{
		grants: grants,
		gpus:   gpus,
		done:   make(chan struct{}),
	}
	h.request.Store(r)
	if grants.CDI() || grants.Claims || h.makes(grants) {
		select {
		case h.wake <- struct{}{}:
		default:
		}
		if !h.specsLate.Load() {
			select {
			case <-r.done:
			case <-h.ended:
			case <-time.After(h.options.PrepareTimeout):
				h.specsLate.Store(true)
			}
		}
	}
	found := h.scan(grants, gpus)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.warn(found)
	before := h.prepared.IMEXLacks
	h.prepared = assemble(grants, h.options.DevRoot, gpus, found, h.entries, h.remedy())
	if lacks := h.prepared.IMEXLacks; lacks != before && lacks != "" {
		h.log.Warn("an IMEX channel is left out of grants", "because", lacks, "required", grants.IMEXRequired)
	}
	return h.prepared
}

// warn logs each file of capabilities that is not as the driver writes them, once. h.mu is held.
func (h *Host) warn(found files) {
	for _, unit := range slices.Sorted(maps.Keys(found.unknown)) {
		err := found.unknown[unit]
		if h.warned[err.Error()] || errors.Is(err, fs.ErrNotExist) {
			continue // A partition that is being destroyed has no files any more.
		}
		h.warned[err.Error()] = true
		h.log.Warn("the device nodes of a partition are not known", "unit", unit, "error", err)
	}
}

// abandonAfter is how long Watch waits at its end for specs that are being written: nvcdi
// makes driver calls of its own, and a hung driver call cannot be cancelled.
const abandonAfter = 500 * time.Millisecond

// Watch writes the specs that Prepare needs, and calls changed, from a goroutine of its
// own, when Prepare would return something else than it last did. It is called once,
// and returns when ctx ends; an error says that a hung driver call was abandoned.
func (h *Host) Watch(ctx context.Context, changed func()) error {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.serve(ctx, changed)
	}()
	<-ctx.Done()
	close(h.ended)
	select {
	case <-ended:
		return nil
	case <-time.After(abandonAfter):
		return errors.New("abandoned the CDI specs, for which the driver does not answer")
	}
}

func (h *Host) serve(ctx context.Context, changed func()) {
	for tick := time.Tick(h.options.Interval); ; {
		ticked := false
		select {
		case <-ctx.Done():
			return
		case <-h.wake:
		case <-tick:
			ticked = true
		}
		r := h.request.Load()
		if r == nil {
			continue
		}
		if r.grants.CDI() || r.grants.Claims {
			h.writeSpecs(ctx, r)
		}
		if h.makes(r.grants) {
			h.makeNodes(ctx, r)
		}
		select {
		case <-r.done:
		default:
			close(r.done)
		}
		h.specsLate.Store(false)
		if ticked && h.changed() {
			changed()
		}
	}
}

// writeSpecs has the request's specs written and remembers which entries there are.
func (h *Host) writeSpecs(ctx context.Context, r *request) {
	var names []string
	err := errors.New("this program cannot make CDI specs")
	if h.options.Specs != nil {
		classes := r.grants.Extras()
		if len(r.grants.IMEXChannels) > 0 {
			classes = append(classes, plugin.IMEXClass)
		}
		names, err = h.options.Specs.Write(ctx, r.gpus, classes)
	}
	next := entries{names: make(map[string]bool, len(names)), minors: map[string]int{}}
	for _, g := range r.gpus {
		next.minors[g.UUID] = g.Minor
	}
	for _, name := range names {
		next.names[name] = true
	}
	if err != nil {
		next.problem = err.Error()
	}
	h.mu.Lock()
	if next.problem != h.entries.problem && err != nil {
		h.log.Warn("cdi specs incomplete", "error", err)
	}
	h.entries = next
	h.mu.Unlock()
}

// makes reports whether nodes that are missing are to be made: for every strategy by which
// something looks for them on the host, also where that is NVIDIA's runtime.
func (h *Host) makes(grants sharing.Grants) bool { return h.options.Maker != nil && !grants.OnlyCDI() }

// makeAgainAfter is the time after which a node that NVIDIA's program has not made is asked for again.
const makeAgainAfter = 10 * time.Second

// makeNodes has the request's missing nodes of capabilities made. That they are missing is all that
// counts, so they are made after a start, after each change of partitions, whoever made it, and
// after the driver's dev was made anew.
func (h *Host) makeNodes(ctx context.Context, r *request) {
	files := h.notThere(r)
	again := slices.Equal(files, h.maker.asked) && time.Now().Before(h.maker.again)
	if len(files) == 0 || again {
		return
	}
	err := h.options.Maker.MakeNodes(ctx, files)
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	h.mu.Lock()
	changed := problem != h.notMade
	h.notMade = problem
	h.mu.Unlock()
	h.maker.asked, h.maker.again = files, time.Now().Add(makeAgainAfter)
	switch left := h.notThere(r); {
	case err != nil && changed:
		h.log.Warn("device nodes of partitions could not be made", "files", files, "error", err)
	case err == nil && len(left) == 0:
		h.log.Info("device nodes of partitions made", "files", files)
		h.maker.asked = nil
	}
}

// notThere are the driver's files of the request's capabilities that have no node, sorted; none
// where the dev is not seen.
func (h *Host) notThere(r *request) (files []string) {
	found := h.scan(r.grants, r.gpus)
	for _, nodes := range found.capabilities {
		for _, node := range nodes {
			if found.nodes != nil && !found.nodes[node.Path] {
				files = append(files, node.Access)
			}
		}
	}
	slices.Sort(files)
	return slices.Compact(files)
}

// remedy is what a text about a missing node of a partition says after that. h.mu is held.
func (h *Host) remedy() string {
	switch {
	case h.options.Maker == nil:
		return "nobody has made it: nvidia-modprobe and nvidia-smi do, and this program with the chart's mig.manage"
	case h.notMade != "":
		return h.notMade
	}
	return "NVIDIA's program has not made it"
}

// changed says that Prepare would return something else now.
func (h *Host) changed() bool {
	r := h.request.Load()
	found := h.scan(r.grants, r.gpus)
	h.mu.Lock()
	defer h.mu.Unlock()
	return !reflect.DeepEqual(assemble(r.grants, h.options.DevRoot, r.gpus, found, h.entries, h.remedy()), h.prepared)
}

// entries are the CDI entries that a container runtime finds.
type entries struct {
	names map[string]bool
	// minors are the GPUs' minor numbers when they were written, by UUID.
	minors map[string]int
	// problem says why entries are missing; empty if none are known to be missing.
	problem string
}

// assemble says what the node has for the units of its GPUs, and which of them cannot
// be granted in the way that the profile wants. remedy is added where a partition's node is missing.
// It is pure.
func assemble(
	grants sharing.Grants,
	devRoot string,
	gpus []sharing.GPU,
	f files,
	e entries,
	remedy string,
) plugin.Host {
	host := plugin.Host{
		DevRoot:      devRoot,
		ControlNodes: f.control,
		Nodes:        map[string][]string{},
		Obstacles:    map[string]string{},
	}
	host.IMEXChannels, host.IMEXLacks = channels(grants, devRoot, f, e)
	for _, class := range grants.Extras() {
		if name := plugin.CDIName(class, "all"); e.names[name] {
			host.Extras = append(host.Extras, name)
		}
	}
	if grants.Claims {
		host.NoCDIEntry = map[string]string{}
	}
	add := func(g sharing.GPU, unit, index string, nodes []string, lacks string) {
		host.Nodes[unit] = nodes
		noEntry := !e.has(unit) || !e.has(index) || e.minors[g.UUID] != g.Minor
		if grants.Claims && noEntry {
			host.NoCDIEntry[unit] = "it has no CDI entry: " + cmp.Or(e.problem, "none is written yet")
		}
		if lacks == "" {
			lacks = missing(f.nodes, devRoot, nodes, remedy)
		}
		switch {
		case f.noDriver != "":
			host.Obstacles[unit] = f.noDriver
		case grants.IMEXRequired && host.IMEXLacks != "":
			host.Obstacles[unit] = host.IMEXLacks + ", which imex.required asks for"
		case grants.Nodes() && lacks != "":
			host.Obstacles[unit] = lacks
		case grants.CDI() && noEntry:
			host.Obstacles[unit] = "it has no CDI entry: " + cmp.Or(e.problem, "none is written yet")
		}
	}
	for _, g := range gpus {
		index := strconv.Itoa(g.Index)
		node := []string(nil)
		lacks := "the driver does not tell its device node"
		if g.Minor >= 0 {
			node, lacks = []string{"/dev/nvidia" + strconv.Itoa(g.Minor)}, ""
		}
		if !g.MIG {
			add(g, g.UUID, index, node, lacks)
			continue
		}
		// A GPU with MIG enabled runs nothing itself, and has no CDI entry.
		host.Nodes[g.UUID] = node
		for _, p := range g.Partitions {
			nodes, lacks := partitionNodes(f, p, node, lacks)
			add(g, p.UUID, index+":"+strconv.Itoa(p.Index), nodes, lacks)
		}
	}
	return host
}

// channels are the IMEX channels that the node has of those that are asked for, and the reason
// why one is missing; "" if none is.
func channels(grants sharing.Grants, devRoot string, f files, e entries) (has []string, lacks string) {
	for _, channel := range grants.IMEXChannels {
		switch {
		case !slices.Contains(f.channels, channel):
			lacks = "there is no device " + filepath.Join("/", devRoot, plugin.IMEXNode(channel))
		case grants.CDI() && !e.names[plugin.CDIName(plugin.IMEXClass, channel)]:
			lacks = "IMEX channel " + channel + " has no CDI entry: " + cmp.Or(e.problem, "none is written yet")
		default:
			has = append(has, channel)
		}
	}
	return has, lacks
}

// partitionNodes are the device nodes of the GPU and of the partition's capabilities.
// If one of them is not known there are none, and the text says which.
func partitionNodes(f files, p sharing.Partition, gpu []string, lacks string) ([]string, string) {
	if lacks != "" {
		return nil, lacks
	}
	if err := f.unknown[p.UUID]; err != nil {
		return nil, "the device nodes of the partition are not known: " + err.Error()
	}
	if f.capabilities == nil {
		return nil, "" // Nothing needs them.
	}
	nodes := slices.Clone(gpu)
	for _, node := range f.capabilities[p.UUID] {
		nodes = append(nodes, node.Path)
	}
	return nodes, ""
}

// missing says which of the device nodes the host does not have: no runtime can start
// a container with it. With existing nil that is not known.
func missing(existing map[string]bool, devRoot string, nodes []string, remedy string) string {
	for _, node := range nodes {
		if existing == nil || existing[node] {
			continue
		}
		lacks := "there is no " + filepath.Join("/", devRoot, node)
		if strings.HasPrefix(node, "/dev/nvidia-caps/") {
			lacks += ": " + remedy
		}
		return lacks
	}
	return ""
}

func (e entries) has(unit string) bool { return e.names[plugin.CDIName(plugin.CDIClass, unit)] }
