package daemon

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/state"
)

// ProfileOptions are the source of the profile: a file, or Source with the Node's label.
type ProfileOptions struct {
	// Path is the file, empty for flags and variables only; Key is as in configsource.File.
	Path, Key string
	// Source has profiles by name. Labels, Default and Fallbacks choose one as in
	// configsource.NodeSource. It is nil for a file.
	Source    configsource.Source
	Default   string
	Fallbacks []configsource.Fallback
	// Labels are the Node's; nil if they are not read.
	Labels *configsource.NodeLabels
	// Overrides are the settings from flags and variables.
	Overrides configs.Overrides
	// Observe is called with each profile that the program reads; nil for none.
	Observe func(configs.SelectedProfile, error)
}

// profile is the opened source of the profile.
type profile struct {
	source        agent.ConfigSource
	lastKnownGood *configsource.LastKnownGood
	// startup are the settings that cannot change while the process runs.
	startup configs.StartupSettings
	name    string
	// rules provides the GPUs' labels for rules, once the GPUs are known.
	rules atomic.Pointer[ruleLabels]
	// stop ends the watching that openProfile has started.
	stop func()
}

// openProfile determines the settings that the process starts with: those of the profile if it is
// known soon enough, else of the last run's profile, else of flags and variables only.
func openProfile(
	ctx context.Context,
	o ProfileOptions,
	last state.Profile,
	reporter *nodestatus.Reporter,
	log *slog.Logger,
) (*profile, error) {
	// The flags must be valid on their own; a wrong document can be mended later.
	flags, err := configs.Parse("", nil, o.Overrides)
	if err != nil {
		return nil, err
	}
	p := &profile{startup: flags.Startup, stop: func() {}}
	restored := false
	if stored, ok := last.Peek(); ok {
		if selected, err := configsource.Restore(stored, o.Overrides); err == nil {
			p.startup, restored = selected.Startup, true
		}
	}
	if o.Labels != nil && reporter != nil {
		o.Labels.Replaced = reporter.NodeReplaced
	}
	if o.Source == nil {
		p.openFile(ctx, o, log)
	} else {
		p.openSource(ctx, o, restored, log)
	}
	if o.Observe != nil {
		p.source = observedSource{p.source, o.Observe}
	}
	p.lastKnownGood = configsource.NewLastKnownGood(last, o.Overrides, p.startup, log)
	return p, nil
}

func (p *profile) openFile(ctx context.Context, o ProfileOptions, log *slog.Logger) {
	file := &configsource.File{
		Path:      o.Path,
		Key:       o.Key,
		Overrides: o.Overrides,
		Labels:    o.Labels,
		Done:      ctx.Done(),
	}
	if config, err := file.Config(); err == nil {
		p.startWith(config.Startup, config.Notes, log)
	}
	file.Started = p.startup
	p.source, p.name = file, file.Path
}

// The start waits for the API server to deliver the profile, because its process settings cannot be
// applied later. It waits for firstProfileTimeout, or for restoredProfileTimeout if the last run's
// profile can serve at once.
const (
	firstProfileTimeout    = 5 * time.Second
	restoredProfileTimeout = time.Second
)

func (p *profile) openSource(ctx context.Context, o ProfileOptions, restored bool, log *slog.Logger) {
	source := &configsource.NodeSource{
		Source:    o.Source,
		Labels:    o.Labels,
		Inventory: p.inventory,
		Default:   o.Default,
		Fallbacks: o.Fallbacks,
		Overrides: o.Overrides,
	}
	watching := configsource.StartWatching(ctx, source)
	timeout := firstProfileTimeout
	if restored {
		timeout = restoredProfileTimeout
	}
	waiting, done := context.WithTimeout(ctx, timeout)
	defer done()
	watching.Await(waiting, func() bool {
		selected, err := source.Selected()
		if err == nil {
			p.startWith(selected.Startup, selected.Notes, log)
		}
		return !errors.Is(err, configs.ErrPending)
	})
	source.Started = p.startup
	p.source, p.name = watching, o.Source.String()
	p.stop = func() {
		if err := watching.Stop(); err != nil {
			log.Warn("profile not followed to the end", "error", err)
		}
	}
}

// inventory returns the GPUs' labels for rules; nil while they are unknown.
func (p *profile) inventory() map[string]string {
	if rules := p.rules.Load(); rules != nil {
		return rules.now()
	}
	return nil
}

// notesLogged limits the logged notes on a document, which may have thousands.
const notesLogged = 100

func (p *profile) startWith(startup configs.StartupSettings, notes []configs.Note, log *slog.Logger) {
	p.startup = startup
	for _, note := range notes[:min(len(notes), notesLogged)] {
		log.Info("note on the profile", "path", note.Path, "note", note.Message)
	}
	if more := len(notes) - notesLogged; more > 0 {
		log.Info("more notes on the profile, which virgate check lists", "count", more)
	}
}

type observedSource struct {
	agent.ConfigSource
	observe func(configs.SelectedProfile, error)
}

func (s observedSource) Profile() (configs.SelectedProfile, error) {
	selected, err := s.ConfigSource.Profile()
	s.observe(selected, err)
	return selected, err
}
