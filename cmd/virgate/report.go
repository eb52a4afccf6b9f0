package main

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/policy/report"
)

// reportFlags say what Kubernetes is told.
func reportFlags() []cli.Flag {
	category := "what the Node says; it takes --node-name and an API server"
	return []cli.Flag{
		&cli.BoolFlag{Name: "node-events", Value: true, DefaultText: "true", Usage: "write Events about profiles and GPUs", Category: category},
		&cli.BoolFlag{Name: "node-condition", Value: true, DefaultText: "true", Usage: "write the condition " + report.ConditionType, Category: category},
		&cli.BoolFlag{Name: "node-annotations", Value: true, DefaultText: "true", Usage: "write annotations with the profile in force, and the labels " + report.StateLabel + " and " + report.MIGStateLabel, Category: category},
		&cli.BoolFlag{Name: "remove-stale-resources", Usage: "take resources that Virgate has stopped out of the Node's capacity, minutes later", Category: category},
	}
}

// newReporter makes what tells Kubernetes; nil when nothing is to be told. Where
// there is no API server nothing is, unless it was asked for.
func newReporter(cmd *cli.Command, log *slog.Logger) (*report.Reporter, error) {
	options := report.Options{
		Node: cmd.String("node-name"), Events: cmd.Bool("node-events"), Condition: cmd.Bool("node-condition"),
		Annotations: cmd.Bool("node-annotations"), RemoveStale: cmd.Bool("remove-stale-resources"),
		Logger: log,
	}
	if !options.Events && !options.Condition && !options.Annotations && !options.RemoveStale {
		return nil, nil
	}
	asked := ""
	for _, name := range []string{"node-events", "node-condition", "node-annotations", "remove-stale-resources"} {
		if cmd.IsSet(name) && cmd.Bool(name) {
			asked = name
		}
	}
	var err error
	if options.Node == "" {
		err = errors.New("no --node-name")
	} else {
		options.Config, err = policy.APIConfig(cmd.String("kubeconfig"))
	}
	switch {
	case err == nil:
		return report.New(options)
	case asked != "":
		return nil, usageError{fmt.Errorf("--%s: %w", asked, err)}
	default:
		log.Info("kubernetes is told nothing", "because", err)
		return nil, nil
	}
}

// replaced is to be called when the Node is another one; nil when nobody is to
// know.
func replaced(reporter *report.Reporter) func() {
	if reporter == nil {
		return nil
	}
	return reporter.NodeReplaced
}
