package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/state"
)

// profileLabel is the label by which NVIDIA's config-manager chooses.
const profileLabel = "nvidia.com/device-plugin.config"

// clusterFlags choose the profile among several, as NVIDIA's config-manager
// does. Their variables are its own, but for $CONFIG_MAP.
func clusterFlags(environment environment) []cli.Flag {
	category := "the profile by the node's label, as with NVIDIA's config-manager"
	text := func(name, variable, preset, usage string, aliases ...string) cli.Flag {
		if value, ok := environment(variable); ok && value != "" {
			preset = value
		}
		return &cli.StringFlag{Name: name, Aliases: aliases, Value: preset, Usage: usage + " [$" + variable + "]", Category: category}
	}
	return []cli.Flag{
		text("config-map", "CONFIG_MAP", "", "the ConfigMap with the profiles, NAMESPACE/NAME, read from the API server"),
		text("config-dir", "CONFIG_FILE_SRCDIR", "", "the directory with the profiles, as a mounted ConfigMap", "config-file-srcdir"),
		text("node-name", "NODE_NAME", "", "this Node's name; without it no label is looked at"),
		text("node-label", "NODE_LABEL", profileLabel, "the Node's label that names the profile"),
		text("default-config", "DEFAULT_CONFIG", "", "the profile of a Node without the label"),
		text("fallback-strategies", "FALLBACK_STRATEGIES", "", "what to do without a label and a default, between commas, in order: named, single, empty"),
		text("kubeconfig", "KUBECONFIG", "", "how to reach the API server; without it as a pod does"),
	}
}

// profiles is where the profile comes from.
type profiles struct {
	agent.Policy
	keeper *policy.Keeper
	// started are the settings that cannot change any more.
	started configs.Process
	// from is what people call it.
	from string
	// stop ends what watches already.
	stop func()
}

// openProfiles finds the source that the flags name, and what the process is to
// start with: what the profile says, if it is known soon enough, else what the
// last one said, else flags and variables alone. Replaced is as in policy.Labels.
func openProfiles(ctx context.Context, cmd *cli.Command, overrides configs.Overrides, kept state.Profile, replaced func(), log *slog.Logger) (profiles, error) {
	// The flags alone must make sense; a document that does not can be mended
	// while the program waits.
	flags, err := configs.Parse("", nil, overrides)
	if err != nil {
		return profiles{}, err
	}
	if err := oneSource(cmd); err != nil {
		return profiles{}, err
	}
	p := profiles{started: flags.Process, stop: func() {}}
	last, hasLast := restore(kept, overrides)
	if hasLast {
		p.started = last.Process
	}
	if cmd.String("config-map") == "" && cmd.String("config-dir") == "" {
		file := &policy.File{Path: cmd.String("config"), Key: cmd.String("config-key"), Overrides: overrides}
		if config, err := file.Config(); err == nil {
			p.start(config, log)
		}
		file.Started = p.started
		if file.Labels, err = newLabels(cmd, nil, log); err != nil {
			log.Info("no label is looked at", "because", err)
		} else if file.Labels != nil {
			file.Labels.Replaced = replaced
		}
		p.Policy, p.from = file, file.Path
	} else if err := p.openNode(ctx, cmd, overrides, hasLast, replaced, log); err != nil {
		return profiles{}, err
	}
	p.keeper = policy.NewKeeper(kept, overrides, p.started, log)
	return p, nil
}

// restore reads the last run's profile, without a claim to it.
func restore(kept state.Profile, overrides configs.Overrides) (configs.Selected, bool) {
	stored, ok := kept.Peek()
	if !ok {
		return configs.Selected{}, false
	}
	last, err := policy.Restore(stored, overrides)
	return last, err == nil
}

// start has the process start with what the profile says.
func (p *profiles) start(config configs.Config, log *slog.Logger) {
	p.started = config.Process
	for _, note := range config.Notes {
		log.Info("profile differs from NVIDIA's plugin", "path", note.Path, "note", note.Message)
	}
}

const (
	// firstChoice is how long the start waits for the API server to tell the
	// profile, so that its settings for the process can be obeyed; nextChoice
	// where the last run's profile is there to serve at once.
	firstChoice, nextChoice = 5 * time.Second, time.Second
)

func (p *profiles) openNode(ctx context.Context, cmd *cli.Command, overrides configs.Overrides, hasLast bool, replaced func(), log *slog.Logger) error {
	node, err := newPolicyNode(cmd, overrides, log)
	if err != nil {
		return err
	}
	if node.Labels != nil {
		node.Labels.Replaced = replaced
	}
	ahead := policy.WatchAhead(ctx, node.Watch)
	patience := firstChoice
	if hasLast {
		patience = nextChoice
	}
	waiting, done := context.WithTimeout(ctx, patience)
	ahead.Await(waiting, func() bool {
		wanted, err := node.Wanted()
		if err == nil {
			p.start(configs.Config{Process: wanted.Process, Notes: wanted.Notes}, log)
		}
		return !errors.Is(err, configs.ErrPending)
	})
	done()
	node.Started = p.started
	p.Policy, p.from = nodePolicy{node, ahead}, node.Shelf.Source()
	p.stop = func() {
		if err := ahead.Stop(); err != nil {
			log.Warn("profile not followed to the end", "error", err)
		}
	}
	return nil
}

// newPolicyNode makes the choice by label, from a ConfigMap or a directory.
func newPolicyNode(cmd *cli.Command, overrides configs.Overrides, log *slog.Logger) (*policy.Node, error) {
	fallbacks, err := policy.ParseFallbacks(cmd.String("fallback-strategies"))
	if err != nil {
		return nil, usageError{fmt.Errorf("--fallback-strategies: %w", err)}
	}
	node := &policy.Node{Default: cmd.String("default-config"), Fallbacks: fallbacks, Overrides: overrides}
	var api *policy.API
	if configMap := cmd.String("config-map"); configMap == "" {
		node.Shelf = &policy.Directory{Path: cmd.String("config-dir")}
	} else {
		namespace, name, err := policy.ParseConfigMapName(configMap)
		if err != nil {
			return nil, usageError{fmt.Errorf("--config-map: %w", err)}
		}
		if api, err = newAPI(cmd); err != nil {
			return nil, err
		}
		node.Shelf = policy.NewConfigMap(api, namespace, name, log)
	}
	if node.Labels, err = newLabels(cmd, api, log); err != nil {
		return nil, err
	}
	if node.Labels == nil {
		log.Info("no label is looked at", "because", "no node name")
	}
	return node, nil
}

func newAPI(cmd *cli.Command) (*policy.API, error) {
	config, err := policy.APIConfig(cmd.String("kubeconfig"))
	if err != nil {
		return nil, err
	}
	return policy.NewAPI(config)
}

// newLabels makes the labels of this Node, nil without its name, over api or, if
// that is nil, over one of their own. The error says that there is no API server.
func newLabels(cmd *cli.Command, api *policy.API, log *slog.Logger) (*policy.Labels, error) {
	name := cmd.String("node-name")
	if name == "" {
		return nil, nil
	}
	if api == nil {
		var err error
		if api, err = newAPI(cmd); err != nil {
			return nil, err
		}
	}
	return policy.NewLabels(api, name, cmp.Or(cmd.String("node-label"), profileLabel), log), nil
}

// oneSource says that several sources are named.
func oneSource(cmd *cli.Command) error {
	var named []string
	for _, name := range []string{"config", "config-map", "config-dir"} {
		if cmd.String(name) != "" {
			named = append(named, fmt.Sprintf("--%s %s", name, cmd.String(name)))
		}
	}
	if len(named) > 1 {
		return usageError{fmt.Errorf("%s exclude each other", strings.Join(named, " and "))}
	}
	if cmd.String("config-key") != "" && cmd.String("config") == "" {
		return usageError{errors.New("--config-key goes with --config")}
	}
	return nil
}

// nodePolicy is a node's profile that is watched already.
type nodePolicy struct {
	node  *policy.Node
	ahead *policy.Ahead
}

// Profile implements agent.Policy.
func (p nodePolicy) Profile() (configs.Selected, error) { return p.node.Profile() }

// Watch implements agent.Policy.
func (p nodePolicy) Watch(ctx context.Context, changed func()) error {
	return p.ahead.Watch(ctx, changed)
}
