package main

import (
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/usage"
)

// metricsFlags say what is measured and how it is shown.
func metricsFlags() []cli.Flag {
	return []cli.Flag{
		&cli.DurationFlag{Name: "sample", Value: 5 * time.Second, Usage: "the time between two samples of who uses the GPUs and how much"},
		&cli.StringFlag{Name: "proc", Value: "/proc", Usage: "where the host's /proc is; a simulated node has its own"},
		&cli.BoolFlag{Name: "watch-pods", Usage: "follow this node's pods at the API server, to tell whose container a process is in; needs --node-name and the right to list and watch pods"},
		&cli.BoolFlag{Name: "metrics-per-container", Value: true, DefaultText: "true", Usage: "whether /metrics has series that name pods"},
		&cli.IntFlag{Name: "metrics-max-series", Value: 10000, Usage: "how many of Virgate's series a scrape may have; virgate_dropped_series counts those beyond"},
		&cli.StringFlag{Name: "web-config-file", Usage: "TLS and basic authentication for --listen, as Prometheus's exporters take them (github.com/prometheus/exporter-toolkit, docs/web-configuration.md)"},
		&cli.StringFlag{Name: "health-listen", Usage: "another HTTP address, for /healthz and /readyz alone and without --web-config-file; empty for none"},
		&cli.BoolFlag{Name: "pprof", Usage: "whether --listen has /debug/pprof/"},
	}
}

// httpOptions are what the flags say of HTTP.
func httpOptions(cmd *cli.Command) (agent.HTTP, error) {
	if most := cmd.Int("metrics-max-series"); most <= 0 {
		return agent.HTTP{}, usageError{fmt.Errorf("--metrics-max-series must be more than 0, got %d", most)}
	}
	options := agent.HTTP{
		ConfigFile:   cmd.String("web-config-file"),
		HealthListen: cmd.String("health-listen"),
		Profiling:    cmd.Bool("pprof"),
		NoContainers: !cmd.Bool("metrics-per-container"),
		MaxSeries:    cmd.Int("metrics-max-series"),
	}
	return options, options.Validate()
}

// newSampler puts together what measures the use of the GPUs. A simulated node
// knows its own processes and containers.
func newSampler(library backend, proc string, containers usage.Containers, log *slog.Logger) *usage.Sampler {
	options := usage.Options{Meter: nvml.NewMeter(library), Proc: os.DirFS(proc), Containers: containers, Logger: log}
	if library.simulated != nil {
		options.Proc, options.Containers = library.simulated.Proc(), library.simulated
	}
	return usage.NewSampler(options)
}
