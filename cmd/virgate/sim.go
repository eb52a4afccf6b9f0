package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/simnode"
)

func simCommand() *cli.Command {
	command := &cli.Command{
		Name:  "sim",
		Usage: "breaks and mends a running simulated node",
		Description: "Talks to a virgate run --node sim:… on the same machine.\n\n" +
			"Example: virgate sim --control-socket /tmp/control.sock xid --gpu 0 79",
		Flags: []cli.Flag{
			controlSocketFlag(),
		},
		Action: func(_ context.Context, cmd *cli.Command) error {
			if name := cmd.Args().First(); name != "" {
				return usageError{fmt.Errorf("no sim command %q; see virgate sim --help", name)}
			}
			return cli.ShowSubcommandHelp(cmd)
		},
	}
	for _, verb := range simnode.Verbs() {
		command.Commands = append(command.Commands, verbCommand(verb))
	}
	return command
}

// verbCommand makes a command of what a simulated node can be told.
func verbCommand(verb simnode.Verb) *cli.Command {
	command := &cli.Command{Name: verb.Name, Usage: verb.Usage}
	var positional []simnode.Argument
	var words []string
	for _, argument := range verb.Arguments {
		if argument.Positional {
			positional = append(positional, argument)
			words = append(words, strings.ToUpper(argument.Name))
			continue
		}
		command.Flags = append(command.Flags, &cli.StringFlag{Name: argument.Name, Usage: argument.Usage, Required: !argument.Optional})
	}
	command.ArgsUsage = strings.Join(words, " ")
	command.Action = func(ctx context.Context, cmd *cli.Command) error {
		if given := cmd.Args().Len(); given > len(positional) {
			return usageError{fmt.Errorf("sim %s: unexpected %q", verb.Name, cmd.Args().Get(len(positional)))}
		}
		arguments := map[string]string{}
		for i, argument := range positional {
			if i < cmd.Args().Len() {
				arguments[argument.Name] = cmd.Args().Get(i)
			}
		}
		for _, argument := range verb.Arguments {
			if !argument.Positional && cmd.IsSet(argument.Name) {
				arguments[argument.Name] = cmd.String(argument.Name)
			}
		}
		return simnode.Command(ctx, cmd.String("control-socket"), verb.Name, arguments)
	}
	return command
}
