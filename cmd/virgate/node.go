package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/nvml/driver"
	"github.com/virgate/virgate/internal/nvml/trace"
	"github.com/virgate/virgate/internal/simnode"
)

// nodeFlags choose the node's GPUs.
func nodeFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{
			Name:  "node",
			Value: "auto",
			Usage: "where the GPUs are: auto or nvml for this machine's driver, trace:FILE for a recorded one, sim:NAME or sim:FILE for a simulated one; names are " +
				strings.Join(simnode.Names(), ", ") + ", and +LAYOUT cuts their boards: sim:dgx-a100+all-1g.5gb",
		},
		&cli.StringFlag{Name: "record", Usage: "the file in which to record what the driver answers, up to 64 MiB, for --node trace:FILE"},
		&cli.BoolFlag{Name: "record-mask", Value: true, DefaultText: "true", Usage: "whether the recording has made-up UUIDs, the same for the same GPU"},
	}
}

// backend is where the GPUs are, as --node, --record and the settings of the
// driver say. It is not opened yet.
type backend struct {
	nvml.Library
	// simulated is nil for one that is not.
	simulated *simnode.Node
	// close ends the recording.
	close func()
}

// openBackend makes the back-end. All of them have the driver's deadlines.
func openBackend(cmd *cli.Command, process configs.Process, log *slog.Logger) (backend, error) {
	b := backend{close: func() {}}
	lib, err := openLibrary(cmd.String("node"), process)
	if err != nil {
		return b, err
	}
	b.simulated, _ = lib.(*simnode.Node)
	b.Library = nvml.WithDeadlines(lib, nvml.Limits{})
	path := cmd.String("record")
	if path == "" {
		return b, nil
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return b, fmt.Errorf("record: %w", err)
	}
	b.Library = trace.Record(b.Library, file, trace.Options{
		Plain:  !cmd.Bool("record-mask"),
		Failed: func(err error) { log.Warn("recording ends", "file", path, "error", err) },
	})
	b.close = func() {
		if err := file.Close(); err != nil {
			log.Warn("recording may not be complete", "file", path, "error", err)
		}
	}
	return b, nil
}

// openLibrary is what --node names.
func openLibrary(name string, process configs.Process) (nvml.Library, error) {
	if name == "auto" || name == "nvml" {
		return driver.Open(driver.Options{DriverRoot: process.DriverRoot, ContainerDriverRoot: process.ContainerDriverRoot})
	}
	if path, ok := strings.CutPrefix(name, "trace:"); ok {
		return openTrace(path)
	}
	if simulated, ok := strings.CutPrefix(name, "sim:"); ok {
		return openSimulated(simulated)
	}
	return nil, usageError{fmt.Errorf("--node %q is none of auto, nvml, trace:FILE, sim:NAME, sim:FILE", name)}
}

func openTrace(path string) (nvml.Library, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read --node: %w", err)
	}
	defer func() { _ = file.Close() }()
	data, err := io.ReadAll(io.LimitReader(file, trace.Limit+1))
	if err != nil {
		return nil, fmt.Errorf("read --node: %w", err)
	}
	lib, err := trace.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return lib, nil
}

func openSimulated(name string) (*simnode.Node, error) {
	base, _, _ := strings.Cut(name, "+")
	if !slices.Contains(simnode.Names(), base) {
		data, err := os.ReadFile(name)
		if err == nil {
			return simnode.Load(name, data)
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("read --node: %w", err)
		}
	}
	return simnode.New(name)
}

// tryDriver says why the driver cannot be opened; nil when it can be, or when
// ctx ended first. It closes it again: whoever serves opens it as often as it
// must.
func tryDriver(ctx context.Context, lib nvml.Library) error {
	tried := make(chan error, 1)
	go func() {
		err := lib.Init()
		if err == nil {
			err = lib.Shutdown()
		}
		tried <- err
	}()
	select {
	case err := <-tried:
		if err != nil {
			return fmt.Errorf("open the driver: %w (with --fail-on-init-error=false it is waited for)", err)
		}
	case <-ctx.Done():
	}
	return nil
}
