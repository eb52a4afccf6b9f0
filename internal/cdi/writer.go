package cdi

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Holders says who holds devices.
type Holders interface {
	// Held fails rather than return an incomplete answer.
	Held(ctx context.Context) ([]sharing.Allocation, error)
}

// Options are a Writer's settings.
type Options struct {
	// Dir is where runtimes look for specs: "/var/run/cdi".
	Dir    string
	Source Source
	// Holders says whose units must keep their entries; nil when nothing can, and
	// then no entry ever leaves.
	Holders Holders
	// Keep is how long the entry of a unit that has left stays at least; 10 min
	// when zero. It covers a container that is just being made.
	Keep time.Duration
	// Retry is the pause after a source that failed; 10 s when zero.
	Retry  time.Duration
	Logger *slog.Logger
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// Writer keeps the specs in a folder. It is for one goroutine.
type Writer struct {
	options Options
	log     *slog.Logger
	units   *product
	extras  map[string]*product
	rivals  rivals
	// left is since when the units of entries are gone, by entry.
	left map[string]time.Time
	// asked is when it was last asked who holds those.
	asked time.Time
}

// product is a spec that a source makes, and the file that it goes to.
type product struct {
	file file
	// of says what made was made for, version by which one of the source.
	of, version string
	made        *specs.Spec
	// err says what is missing in made; it is tried again at again.
	err   error
	again time.Time
}

// NewWriter returns a Writer that has touched nothing yet.
func NewWriter(options Options) *Writer {
	options.Keep = cmp.Or(options.Keep, 10*time.Minute)
	options.Retry = cmp.Or(options.Retry, 10*time.Second)
	if options.Now == nil {
		options.Now = time.Now
	}
	return &Writer{
		options: options, log: options.Logger.With("component", "cdi"),
		units:  &product{file: file{dir: options.Dir, class: plugin.CDIClass}},
		extras: map[string]*product{},
	}
}

// Write sees to it that the specs have entries for the boards, their partitions
// and the extra classes, and returns the qualified names of all entries that a
// runtime finds in the files, sorted by class and name. It asks the source only
// for other boards than the last time, in another version, or when that
// failed.
//
// An error says what is missing; names are valid all the same. Whatever a spec
// had before for a unit of this node stays when the source cannot make it
// anew.
func (w *Writer) Write(ctx context.Context, gpus []sharing.GPU, extras []string) (names []string, err error) {
	errs := []error{w.writeUnits(ctx, gpus)}
	names = qualified(w.units.file)
	own := map[string]bool{w.units.file.name(): true}
	for _, class := range extras {
		p := w.extras[class]
		if p == nil {
			p = &product{file: file{dir: w.options.Dir, class: class}}
			w.extras[class] = p
		}
		errs = append(errs, w.writeExtra(p))
		names = append(names, qualified(p.file)...)
		own[p.file.name()] = true
	}
	w.rivals.look(w.options.Dir, own)
	names, err = w.rivals.without(names)
	return names, errors.Join(append(errs, err)...)
}

// qualified are the names of the entries that a runtime finds.
func qualified(f file) []string {
	if f.seen == nil {
		return nil
	}
	names := entryNames(f.spec)
	for i, name := range names {
		names[i] = plugin.CDIName(f.class, name)
	}
	return names
}

func (w *Writer) writeUnits(ctx context.Context, gpus []sharing.GPU) error {
	p := w.units
	made := p.make(fingerprint(gpus), w, func() (*specs.Spec, error) { return w.options.Source.Units(gpus) })
	changed, spoilt := p.file.look()
	if !made && !changed && !w.reconsider() {
		return p.err
	}
	spec, err := merge(plugin.CDIClass, p.made, p.file.spec, w.keeper(ctx, gpus, p.file.spec))
	if err == nil {
		err = w.replace(&p.file, spec, spoilt)
	}
	return errors.Join(p.err, err)
}

// writeExtra keeps the file that is there when the source has nothing.
func (w *Writer) writeExtra(p *product) error {
	p.make(p.file.class, w, func() (*specs.Spec, error) { return w.options.Source.Extra(p.file.class) })
	_, spoilt := p.file.look()
	if p.made == nil {
		return errors.Join(p.err, spoilt)
	}
	return w.replace(&p.file, p.made, spoilt)
}

// replace brings the file to spec and mentions what was wrong with the one
// before; where it cannot, that is the caller's to tell.
func (w *Writer) replace(f *file, spec *specs.Spec, spoilt error) error {
	if err := f.replace(spec); err != nil {
		return err
	}
	if spoilt != nil {
		w.log.Warn("cdi spec replaced", "error", spoilt)
	}
	return nil
}

// make has the spec made where it is for something else or was not complete,
// and says whether it has.
func (p *product) make(of string, w *Writer, source func() (*specs.Spec, error)) bool {
	now, version := w.options.Now(), w.options.Source.Version()
	if p.of == of && p.version == version && (p.err == nil || now.Before(p.again)) {
		return false
	}
	p.of, p.version, p.again = of, version, now.Add(w.options.Retry)
	p.made, p.err = source()
	return true
}
