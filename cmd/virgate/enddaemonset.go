package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodestatus"
)

// endDaemonSetCommand is the chart's hook before helm uninstall. helm uninstall removes the
// permission to write to Nodes while the pods are still ending; the hook ends them before that.
func endDaemonSetCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "end-daemonset",
		Usage: "deletes the chart's DaemonSet and waits for its pods, so that each can say that it has ended",
		Description: "The chart runs it before helm uninstall. It succeeds in any case, as what it cannot do must " +
			"not keep\n" +
			"the release, and names the nodes whose pods haven't ended.\n\n" +
			"Example: virgate end-daemonset --daemonset virgate/virgate",
		Flags:  flagTable.Of(environment, "[end-daemonset]", "kubeconfig"),
		Hidden: true,
		Action: endDaemonSet,
	}
}

func endDaemonSet(ctx context.Context, cmd *cli.Command) error {
	set, wait := cmd.String("daemonset"), cmd.Duration("wait")
	namespace, name, err := configsource.ParseConfigMapName(set)
	if err != nil {
		return command.Usage(fmt.Errorf("--daemonset: %w", err))
	}
	var left []string
	config, err := kube.RESTConfig(cmd.String("kubeconfig"))
	if err == nil {
		left, err = nodestatus.EndDaemonSet(ctx, config, namespace, name, wait)
	}
	say := func(format string, values ...any) {
		_, _ = fmt.Fprintf(cmd.Root().Writer, "DaemonSet "+set+": "+format+"\n", values...)
	}
	switch {
	case errors.Is(err, nodestatus.ErrNotOfHelm):
		say("it stays, as Helm did not install it")
	case err != nil:
		say("its pods may not have ended: %v", err)
	case len(left) == 0:
		say("its pods have ended")
	}
	if len(left) > 0 {
		say("after %s its pods have not ended on %s; where the condition %s stays as it is, virgate uninstall "+
			"takes it away",
			wait, strings.Join(left, ", "), nodestatus.ConditionType)
	}
	return nil
}
