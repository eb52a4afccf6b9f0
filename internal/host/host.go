// Package host finds what a node's file system provides for containers: the driver's device nodes,
// including those of partitions; a driver that an installer brings; and the CDI specs. The result
// is a grant.Host.
//
// The package itself only reads. A Specs writes the specs, and a NodeMaker creates missing device
// nodes. The package does not call the driver: the GPUs come from the inventory. Read host.go
// first, then files.go.
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
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// Specs maintains the node's CDI specs. A Host calls it from one goroutine.
type Specs interface {
	// Write makes sure that the specs have entries for the GPUs and for the extra classes. It
	// returns the qualified names of all entries that a container runtime finds, even with an
	// error. It writes only what has changed. The error says what could not be done. Write may call
	// the driver and block.
	Write(ctx context.Context, gpus []sharing.GPU, extras []string) (names []string, err error)
}

// NodeMaker creates the device nodes of capabilities. A Host calls it from one goroutine.
type NodeMaker interface {
	// MakeNodes runs NVIDIA's program to create the device nodes of the driver's files at these
	// paths, such as "/proc/driver/nvidia/capabilities/gpu0/mig/gi7/access". The nodes are created
	// in the dev whose nodes containers get. The caller checks afterwards which nodes exist.
	// MakeNodes may block until ctx ends.
	MakeNodes(ctx context.Context, files []string) error
}

// Options are a Host's settings.
type Options struct {
	// Root is where the host's "/" is mounted for this process; empty for "/".
	Root string
	// DevRoot is the host's folder that contains the driver's dev; empty for "/".
	DevRoot string
	// Dev is where that folder is mounted for this process. If Root is set, Dev is ignored and the
	// folder is looked up below Root. If both are empty, the dev is not visible: a container's own
	// dev does not count, because it has fewer nodes than the host's.
	Dev string
	// Capabilities reads the capability nodes of partitions.
	Capabilities migcaps.Reader
	// Maker creates missing nodes; nil if this program may not create any.
	Maker NodeMaker
	// Specs maintains the CDI specs; nil if they cannot be made.
	Specs Specs
	// Interval is the time between two checks of the files; 1 s when zero.
	Interval time.Duration
	// PrepareTimeout is how long Prepare waits for new CDI specs; 2 s when zero.
	PrepareTimeout time.Duration
	Logger         *slog.Logger
}

// Host finds what a node's file system provides for grants, and has CDI specs written.
type Host struct {
	options Options
	log     *slog.Logger
	// wake makes Watch handle a new request.
	wake wake.Signal
	// ended is closed when Watch ends; no specs are written after that.
	ended chan struct{}
	// specsLate is set when Prepare has timed out. Later calls then do not wait until Watch has
	// caught up.
	specsLate atomic.Bool

	// request is the latest request; nil before the first.
	request atomic.Pointer[request]

	mu       sync.Mutex
	prepared grant.Host
	entries  entries
	// notMade is the reason why NVIDIA's program could not create the missing nodes; empty if it
	// was not run or reported success.
	notMade string
	// warned holds the texts that were already logged.
	warned map[string]bool

	// maker is used only by Watch.
	maker struct {
		// asked lists the files for which the program was last run.
		asked []string
		// again is when the program may be run again for the same files.
		again time.Time
	}
}

// request is what a plan needs.
type request struct {
	grants sharing.Grants
	gpus   []sharing.GPU
	// done is closed when the request's specs are written or could not be written.
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
		wake:    wake.NewSignal(),
		ended:   make(chan struct{}),
		warned:  map[string]bool{},
	}
}

// Prepare returns what the node provides for the plan's grants. Watch writes the CDI specs of new
// GPUs and has missing device nodes created. Prepare waits for that, but at most
// Options.PrepareTimeout and only while Watch runs. A unit that still lacks its entry or its nodes
// has an obstacle. The caller must not change the result.
func (h *Host) Prepare(grants sharing.Grants, gpus []sharing.GPU) grant.Host {
	r := &request{
		grants: grants,
		gpus:   gpus,
		done:   make(chan struct{}),
	}
	h.request.Store(r)
	if grants.CDI() || grants.Claims || h.makes(grants) {
		h.wake.Notify()
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

// warn logs each capability file that is not as the driver writes it, once. h.mu is held.
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

// abandonAfter is how long Watch, when it ends, waits for specs that are being written. nvcdi makes
// driver calls of its own, and a hung driver call cannot be cancelled.
const abandonAfter = 500 * time.Millisecond

// Watch writes the specs that Prepare needs. It calls changed, from a goroutine of its own, when
// Prepare would return something other than it last did. Watch must be called only once. It returns
// when ctx ends; an error means that it abandoned a hung driver call.
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

// writeSpecs has the request's specs written and records which entries exist.
func (h *Host) writeSpecs(ctx context.Context, r *request) {
	var names []string
	err := errors.New("this program cannot make CDI specs")
	if h.options.Specs != nil {
		classes := r.grants.Extras()
		if len(r.grants.IMEXChannels) > 0 {
			classes = append(classes, grant.IMEXClass)
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

// makes reports whether missing nodes are to be created: for every strategy in which any program,
// including NVIDIA's runtime, looks for them on the host.
func (h *Host) makes(grants sharing.Grants) bool { return h.options.Maker != nil && !grants.OnlyCDI() }

// makeAgainAfter is the delay before NVIDIA's program is run again for a node that it did not
// create.
const makeAgainAfter = 10 * time.Second

// makeNodes has the request's missing capability nodes created. It acts only on their absence, so
// they are created after a start, after each change of partitions by any program, and after the
// driver's dev was recreated.
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

// notThere returns the driver's files of the request's capabilities that have no node, sorted. It
// returns none if the dev is not visible.
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

// remedy returns the text that follows a report of a partition's missing node. h.mu is held.
func (h *Host) remedy() string {
	switch {
	case h.options.Maker == nil:
		return "it was not made: nvidia-modprobe or nvidia-smi does that, or this program with the chart's mig.manage"
	case h.notMade != "":
		return h.notMade
	}
	return "NVIDIA's program has not made it"
}

// changed reports whether Prepare would now return something else.
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
	// minors holds the GPUs' minor numbers when the entries were written, by UUID.
	minors map[string]int
	// problem is the reason why entries are missing; empty if none is known to be missing.
	problem string
}

// assemble returns what the node provides for the units of its GPUs, and which units cannot be
// granted as the profile requires. remedy is added to reports of a partition's missing node.
// assemble is pure.
func assemble(
	grants sharing.Grants,
	devRoot string,
	gpus []sharing.GPU,
	f files,
	e entries,
	remedy string,
) grant.Host {
	host := grant.Host{
		DevRoot:      devRoot,
		ControlNodes: f.control,
		Nodes:        map[string][]string{},
		Obstacles:    map[string]string{},
	}
	host.IMEXChannels, host.IMEXLacks = channels(grants, devRoot, f, e)
	for _, class := range grants.Extras() {
		if name := grant.CDIName(class, "all"); e.names[name] {
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
		node := []string(nil)
		lacks := "the driver does not tell its device node"
		if g.Minor >= 0 {
			node, lacks = []string{grant.GPUNode(g.Minor)}, ""
		}
		if !g.MIG {
			add(g, g.UUID, strconv.Itoa(g.Index), node, lacks)
			continue
		}
		// A GPU with MIG enabled runs nothing itself and has no CDI entry.
		host.Nodes[g.UUID] = node
		for _, p := range g.Partitions {
			nodes, lacks := partitionNodes(f, p, node, lacks)
			add(g, p.UUID, g.PartitionIndex(p), nodes, lacks)
		}
	}
	return host
}

// channels returns the requested IMEX channels that the node has, and the reason why one is
// missing; empty if none is.
func channels(grants sharing.Grants, devRoot string, f files, e entries) (has []string, lacks string) {
	for _, channel := range grants.IMEXChannels {
		switch {
		case !slices.Contains(f.channels, channel):
			lacks = "there is no device " + filepath.Join("/", devRoot, grant.IMEXNode(channel))
		case grants.CDI() && !e.names[grant.CDIName(grant.IMEXClass, channel)]:
			lacks = "IMEX channel " + channel + " has no CDI entry: " + cmp.Or(e.problem, "none is written yet")
		default:
			has = append(has, channel)
		}
	}
	return has, lacks
}

// partitionNodes returns the device nodes of the GPU and of the partition's capabilities. If one of
// them is unknown, it returns no nodes and a text that names it.
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

// missing describes the first of the device nodes that the host lacks; no runtime can start a
// container with such a node. If existing is nil, the host's nodes are unknown and nothing is
// reported.
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

func (e entries) has(unit string) bool { return e.names[grant.CDIName(grant.CDIClass, unit)] }
