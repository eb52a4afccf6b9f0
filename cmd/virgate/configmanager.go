package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/configsource"
)

// configManagerCommand does what NVIDIA's config-manager does, so that its manifests work with this
// image. Virgate itself does not need it: see profileOptions.
func configManagerCommand(environment environment, stderr io.Writer) *cli.Command {
	flags := flagTable.Of(environment, "config-dir", "node-name", "node-label", "default-config", "fallback-strategies",
		"kubeconfig", "[config-manager]", "[log]")
	once, _ := environment("ONESHOT")
	_, onceErr := strconv.ParseBool(cmp.Or(once, "false"))
	return &cli.Command{
		Name:  "config-manager",
		Usage: "keeps a link to the profile that the node's label names, like NVIDIA's config-manager",
		Description: "For manifests of NVIDIA's device plugin in which only the image is replaced.\n" +
			"When no profile can be chosen, the link stays as it is. virgate run --config-map needs no such " +
			"helper.\n\n" +
			"Example: virgate config-manager --config-dir /available-configs --config-file-dst /config/config.yaml " +
			"--oneshot",
		Flags:  flags,
		Hidden: true,
		Action: func(ctx context.Context, cmd *cli.Command) error {
			for _, needed := range []string{"config-dir", "config-file-dst"} {
				if cmd.String(needed) == "" {
					return command.Usage(fmt.Errorf("config-manager needs --%s", needed))
				}
			}
			if onceErr != nil && !cmd.IsSet("oneshot") {
				return command.Usage(fmt.Errorf("$ONESHOT: expected true or false (got %q)", once))
			}
			return withLog(cmd, stderr, func(log *slog.Logger) error {
				o, err := profileOptions(cmd, nil, log)
				if err != nil {
					return err
				}
				node := &configsource.NodeSource{
					Source:    o.Source,
					Labels:    o.Labels,
					Default:   o.Default,
					Fallbacks: o.Fallbacks,
				}
				m := configManager{
					node: node,
					dir:  cmd.String("config-dir"),
					link: cmd.String("config-file-dst"),
					log:  log,
				}
				return m.run(ctx, cmd.Bool("oneshot"))
			})
		},
	}
}

type configManager struct {
	node *configsource.NodeSource
	// dir contains the profiles; link points to the chosen one.
	dir, link string
	log       *slog.Logger
	// lastError is the last error that was logged.
	lastError string
}

// run follows the label until ctx ends, or, with once, until a profile has been chosen. With once
// it is no error if none can be chosen: a plugin that starts without the link serves the profile of
// its last run, but one that never starts serves nothing.
func (m *configManager) run(ctx context.Context, once bool) error {
	watching := configsource.StartWatching(ctx, m.node)
	watching.Await(ctx, func() bool { return m.look() && once })
	if err := watching.Stop(); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// look points the link to the chosen profile. It returns false while the choice is not known.
func (m *configManager) look() bool {
	wanted, err := m.node.Selected()
	if errors.Is(err, configs.ErrPending) {
		return false
	}
	// The plugin checks whether the profile is valid.
	switch _, missing := os.Stat(filepath.Join(m.dir, wanted.Name)); {
	case wanted.Name != "" && missing == nil:
		err = m.point(filepath.Join(m.dir, wanted.Name))
	case err == nil:
		err = m.point("")
	}
	if err != nil && err.Error() != m.lastError {
		m.log.Error("no profile chosen, the link stays as it is", "link", m.link, "error", err)
	}
	m.lastError = fmt.Sprint(err)
	return true
}

// point makes the link point to the file, or replaces it by an empty file if target is "". It
// replaces it by a rename, so that one or the other always exists.
func (m *configManager) point(target string) error {
	if now, err := os.Readlink(m.link); err == nil && now == target {
		return nil
	}
	if info, err := os.Lstat(m.link); target == "" && err == nil && info.Mode().IsRegular() && info.Size() == 0 {
		return nil
	}
	next := m.link + ".next"
	err := os.Remove(next)
	switch {
	case err != nil && !errors.Is(err, os.ErrNotExist):
	case target == "":
		err = os.WriteFile(next, nil, 0o644) //nolint:gosec // other users read it
	default:
		err = os.Symlink(target, next)
	}
	if err == nil {
		err = os.Rename(next, m.link)
	}
	if err != nil {
		return fmt.Errorf("choose %s: %w", target, err)
	}
	m.log.Info("profile chosen", "link", m.link, "profile", target)
	return nil
}
