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
	// left is since when the units of entries are gone, by entry.
	left map[string]time.Time
	// asked is when it was last asked who holds those.
	asked time.Time
}

// product is a spec that a source makes, and the file that it goes to.
type product struct {
	file file
	// of is the fingerprint of what made was made for.
	of   string
	made *specs.Spec
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
		extras: map[string]*product{}, left: map[string]time.Time{},
	}
}

// Write sees to it that the specs have entries for the boards, their partitions
// and the extra classes, and returns the qualified names of all entries in the
// files, sorted by class and name. It asks the source only for other boards than
// the last time, or when that failed.
//
// An error says what is missing; names are valid all the same. Whatever a spec
// had before for a unit of this node stays when the source cannot make it
// anew.
func (w *Writer) Write(ctx context.Context, gpus []sharing.GPU, extras []string) (names []string, err error) {
	var errs []error
	if err := w.writeUnits(ctx, gpus); err != nil {
		errs = append(errs, err)
	}
	names = qualified(w.units.file)
	for _, class := range extras {
		p := w.extras[class]
		if p == nil {
			p = &product{file: file{dir: w.options.Dir, class: class}}
			w.extras[class] = p
		}
		if err := w.writeExtra(p); err != nil {
			errs = append(errs, err)
		}
		names = append(names, qualified(p.file)...)
	}
	return names, errors.Join(errs...)
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
	changed, err := p.file.look()
	if err != nil {
		w.log.Warn("cdi spec replaced", "error", err)
	}
	if !made && !changed && !w.reconsider() {
		return p.err
	}
	spec, err := merge(plugin.CDIClass, p.made, p.file.spec, w.keeper(ctx, gpus))
	if err == nil {
		err = p.file.replace(spec)
	}
	return errors.Join(p.err, err)
}

// writeExtra keeps the file that is there when the source has nothing.
func (w *Writer) writeExtra(p *product) error {
	p.make(p.file.class, w, func() (*specs.Spec, error) { return w.options.Source.Extra(p.file.class) })
	if _, err := p.file.look(); err != nil {
		w.log.Warn("cdi spec replaced", "error", err)
	}
	if p.made == nil {
		return p.err
	}
	return errors.Join(p.err, p.file.replace(p.made))
}

// make has the spec made where it is for something else or was not complete,
// and says whether it has.
func (p *product) make(of string, w *Writer, source func() (*specs.Spec, error)) bool {
	now := w.options.Now()
	if p.of == of && (p.err == nil || now.Before(p.again)) && !p.again.IsZero() {
		return false
	}
	p.of, p.again = of, now.Add(w.options.Retry)
	p.made, p.err = source()
	return true
}
