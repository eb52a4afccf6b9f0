package command

import (
	"context"
	"strings"

	"github.com/urfave/cli/v3"
)

// ShortHelp has --help show only the flags with these names, in this order and a line for each. It adds
// --help-all, which shows all.
func ShortHelp(cmd *cli.Command, names ...string) *cli.Command {
	const helpAll = "help-all"
	usages := map[string]string{}
	for _, flag := range cmd.Flags {
		usage, _, _ := strings.Cut(flag.(cli.DocGenerationFlag).GetUsage(), " [$")
		usage, _, _ = strings.Cut(usage, ";")
		usages[flag.Names()[0]] = usage
	}
	var options Text
	table := options.Table()
	for _, name := range names {
		table.Row("   --"+name, usages[name])
	}
	table.End()
	front, _, _ := strings.Cut(cli.CommandHelpTemplate, "{{if .VisibleFlagCategories}}")
	cmd.CustomHelpTemplate = front + "\n\nOPTIONS:\n" + options.String() + "\n--" + helpAll +
		" shows all options, with their defaults and variables.\n"
	cmd.Flags = append(cmd.Flags, &cli.BoolFlag{
		Name:  helpAll,
		Usage: "show all options",
		Local: true,
	})
	action := cmd.Action
	cmd.Action = func(ctx context.Context, cmd *cli.Command) error {
		if !cmd.Bool(helpAll) {
			return action(ctx, cmd)
		}
		cmd.CustomHelpTemplate = ""
		return cli.ShowCommandHelp(ctx, cmd.Lineage()[1], cmd.Name)
	}
	return cmd
}
