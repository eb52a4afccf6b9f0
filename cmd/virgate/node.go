package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/simnode"
)

// errNoDriver says that this program has no back-end for a real driver.
var errNoDriver = errors.New("this release has no back-end for a real NVIDIA driver yet; use --node sim:NAME")

func nodeFlag() cli.Flag {
	return &cli.StringFlag{
		Name:  "node",
		Value: "auto",
		Usage: "where the GPUs are: auto, nvml, sim:NAME or sim:FILE; names are " + strings.Join(simnode.Names(), ", ") +
			", and +LAYOUT cuts their boards: sim:dgx-a100+all-1g.5gb",
	}
}

// openNode returns the simulated node that --node names.
func openNode(name string) (*simnode.Node, error) {
	simulated, ok := strings.CutPrefix(name, "sim:")
	switch {
	case ok:
	case name == "auto", name == "nvml":
		return nil, errNoDriver
	default:
		return nil, usageError{fmt.Errorf("--node %q is none of auto, nvml, sim:NAME, sim:FILE", name)}
	}
	base, _, _ := strings.Cut(simulated, "+")
	if !slices.Contains(simnode.Names(), base) {
		data, err := os.ReadFile(simulated)
		if err == nil {
			return simnode.Load(simulated, data)
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("read --node: %w", err)
		}
	}
	return simnode.New(simulated)
}
