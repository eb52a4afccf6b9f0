// Package cdi maintains the node's CDI specs, which tell a container runtime what a container with
// a GPU or a partition needs: device nodes, the driver's libraries, hooks. The contents come from
// NVIDIA's library nvcdi through Driver, or from Simulated on a simulated node. The
// container-device-interface library reads, validates and writes specs.
//
// Entries and files have the same names as in NVIDIA's device plugin, so a container can restart
// after either plugin has replaced the other. An entry outlives its unit while a running pod may
// need it, because a container restarts with the response that it first got.
//
// Claims reads the specs of other programs to find which GPUs containers have through DRA.
//
// The package allocates nothing and watches nothing; its caller decides when to check the files.
// Read writer.go first, then source.go (which entries there are), file.go (how they are written)
// and driver_cgo.go (how nvcdi is called). claims.go is independent of them.
package cdi

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Holders knows which devices pods hold.
type Holders interface {
	// Held returns an error instead of an incomplete answer.
	Held(ctx context.Context) ([]sharing.Allocation, error)
}

// Options are a Writer's settings.
type Options struct {
	// Dir is the folder in which runtimes look for specs: "/var/run/cdi".
	Dir    string
	Source Source
	// Holders knows which units must keep their entries; if nil, all do.
	Holders Holders
	// Retry is the delay before a failed source is called again; 10 s when zero.
	Retry  time.Duration
	Logger *slog.Logger
}

// retention is the shortest time for which the entry of a unit that is gone remains. It protects
// containers that are just being created.
const retention = 10 * time.Minute

// Writer maintains the specs in a folder. It must be used from one goroutine.
type Writer struct {
	options Options
	log     *slog.Logger
	now     func() time.Time
	units   *generated
	extras  map[string]*generated
	others  specFiles
	// goneSince is when an entry's unit was first missing, by entry.
	goneSince map[string]time.Time
	// holdersAsked is when the holders of those entries were last checked.
	holdersAsked time.Time
}

// generated is a spec from the source, and its file.
type generated struct {
	file file
	// inputs and version are the inputs and the source's version for which spec was made.
	inputs, version string
	spec            *specs.Spec
	// err says what spec lacks; the source is called again at retryAt.
	err     error
	retryAt time.Time
}

// NewWriter returns a Writer that has written nothing yet.
func NewWriter(options Options) *Writer {
	options.Retry = cmp.Or(options.Retry, 10*time.Second)
	return &Writer{
		options: options,
		log:     options.Logger.With("component", "cdi"),
		now:     time.Now,
		units:   &generated{file: file{dir: options.Dir, class: grant.CDIClass}},
		extras:  map[string]*generated{},
	}
}

// Write makes sure that the specs have entries for the GPUs, their partitions and the extra
// classes. It returns the qualified names of all entries that a runtime finds in the files, sorted
// by class and name, even with an error. It calls the source only if the GPUs or the source's
// version have changed, or if the source failed the last time.
//
// The error says what is missing. If the source cannot make an entry of one of this node's units
// again, the old entry remains.
func (w *Writer) Write(ctx context.Context, gpus []sharing.GPU, extras []string) (names []string, err error) {
	errs := []error{w.writeUnits(ctx, gpus)}
	names = qualified(w.units.file)
	own := map[string]bool{w.units.file.name(): true}
	for _, class := range extras {
		extra := w.extras[class]
		if extra == nil {
			extra = &generated{file: file{dir: w.options.Dir, class: class}}
			w.extras[class] = extra
		}
		errs = append(errs, w.writeExtra(extra))
		names = append(names, qualified(extra.file)...)
		own[extra.file.name()] = true
	}
	w.others.refresh(own, w.options.Dir)
	names, err = w.others.filter(names)
	return names, errors.Join(append(errs, err)...)
}

// qualified returns the qualified names of the file's entries.
func qualified(f file) []string {
	if f.seen == nil || f.spec == nil {
		return nil
	}
	names := make([]string, len(f.spec.Devices))
	for i, d := range f.spec.Devices {
		names[i] = grant.CDIName(f.class, d.Name)
	}
	return names
}

func (w *Writer) writeUnits(ctx context.Context, gpus []sharing.GPU) error {
	u := w.units
	made := w.generate(u, fingerprint(gpus), func() (*specs.Spec, error) { return w.options.Source.Units(gpus) })
	changed, unusable := u.file.refresh()
	if !made && !changed && w.now().Before(w.holdersAsked.Add(holdersInterval)) {
		return u.err
	}
	spec, err := merge(grant.CDIClass, u.spec, u.file.spec, w.retainer(ctx, gpus, u.file.spec))
	if err == nil {
		err = w.replace(&u.file, spec, unusable)
	}
	return errors.Join(u.err, err)
}

// writeExtra keeps an existing file if the source has nothing for it.
func (w *Writer) writeExtra(g *generated) error {
	w.generate(g, g.file.class, func() (*specs.Spec, error) { return w.options.Source.Extra(g.file.class) })
	_, unusable := g.file.refresh()
	if g.spec == nil {
		return errors.Join(g.err, unusable)
	}
	return w.replace(&g.file, g.spec, unusable)
}

// replace writes the file, and marks it as stale if that fails. When it has replaced an unusable
// file, it logs what was wrong with that file.
func (w *Writer) replace(f *file, spec *specs.Spec, unusable error) error {
	err := f.update(spec)
	f.stale = err != nil
	if err == nil && unusable != nil {
		w.log.Warn("cdi spec replaced", "error", unusable)
	}
	return err
}

// generate calls the source if the inputs or the source's version have changed, or if it failed the
// last time and its retry is due. It reports whether it called the source.
func (w *Writer) generate(g *generated, inputs string, source func() (*specs.Spec, error)) bool {
	now, version := w.now(), w.options.Source.Version()
	if g.inputs == inputs && g.version == version && (g.err == nil || now.Before(g.retryAt)) {
		return false
	}
	g.inputs = inputs
	g.version = version
	g.retryAt = now.Add(w.options.Retry)
	g.spec, g.err = source()
	if _, refused := errors.AsType[*refusal](g.err); refused {
		g.retryAt = now
	}
	return true
}

// holdersInterval is the time between two checks of which pods hold units that are gone.
const holdersInterval = time.Minute

// retainer returns a function that reports whether an entry of the spec remains although the source
// has not made it: it does if the node still has the unit, or if a pod may hold it.
//
// An entry by index remains only for the retention time, because the index soon names another unit,
// which users of indexes accept. If that unit has no entry yet, the index has none either: the old
// entry would give a container the wrong unit. The same is true of an entry whose device node is
// not the GPU's current one.
func (w *Writer) retainer(ctx context.Context, gpus []sharing.GPU, spec *specs.Spec) func(name string) bool {
	now := w.now()
	w.holdersAsked = now
	edits := map[string]specs.ContainerEdits{}
	if spec != nil {
		for _, d := range spec.Devices {
			edits[d.Name] = d.ContainerEdits
		}
	}
	present := map[string]bool{}
	for _, u := range units(gpus) {
		// After a change of MIG mode, an old device node may belong to another GPU.
		path := grant.GPUNode(u.gpu.Minor)
		own := u.gpu.Minor < 0 || slices.ContainsFunc(edits[u.id].DeviceNodes,
			func(n *specs.DeviceNode) bool { return n.Path == path })
		present[u.id], present[u.index] = own, own && reflect.DeepEqual(edits[u.id], edits[u.index])
	}
	before := w.goneSince
	w.goneSince = map[string]time.Time{}
	held := sync.OnceValue(func() func(unit string) bool { return w.held(ctx) })
	return func(name string) bool {
		if own, ok := present[name]; ok {
			return own
		}
		since, known := before[name]
		if !known {
			since = now
		}
		if now.Before(since.Add(retention)) || held()(name) {
			w.goneSince[name] = since
			return true
		}
		return false
	}
}

// held returns a function that reports whether a pod may hold a unit. The function always returns
// true if the holders are unknown.
func (w *Writer) held(ctx context.Context) func(unit string) bool {
	var allocations []sharing.Allocation
	err := errors.ErrUnsupported
	if w.options.Holders != nil {
		allocations, err = w.options.Holders.Held(ctx)
	}
	if err != nil {
		return func(string) bool { return true }
	}
	holders := sharing.HoldersByUnit(allocations)
	return func(unit string) bool { return len(holders[unit]) > 0 }
}

// merge adds to made the entries of before that made lacks and keep accepts. A nil spec has no
// entries.
func merge(class string, made, before *specs.Spec, keep func(name string) bool) (*specs.Spec, error) {
	if before == nil {
		before = &specs.Spec{}
	}
	if made == nil {
		made = &specs.Spec{ContainerEdits: before.ContainerEdits}
	}
	devices := slices.Clone(made.Devices)
	for _, d := range before.Devices {
		if keep(d.Name) {
			devices = append(devices, d)
		}
	}
	return newSpec(class, devices, made.ContainerEdits)
}
