package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

func healthCommand() *cli.Command {
	return &cli.Command{
		Name:  "health",
		Usage: "shows the health of a running Virgate's GPUs and partitions, and clears it",
		Description: "Talks to the virgate run on the same machine.\n\n" +
			"Example: virgate health",
		Flags:    append(flagTable.Of(nil, "client/control-socket"), command.OutputFlag()),
		Commands: []*cli.Command{clearCommand()},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			return healthRequest(ctx, cmd, http.MethodGet, "/health", nil)
		},
	}
}

func clearCommand() *cli.Command {
	return &cli.Command{
		Name:  "clear",
		Usage: "lets a GPU or partition be used again, whatever errors it reported",
		Description: "It is offered again when the next probe finds nothing wrong. A GPU includes all of\n" +
			"its partitions. Reset or replace a GPU with a fatal error first: this does neither.\n\n" +
			"Example: virgate health clear --gpu 0",
		Flags: flagTable.Of(nil, "health clear/gpu"),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			return healthRequest(ctx, cmd, http.MethodPost, "/health/clear", url.Values{"gpu": {cmd.String("gpu")}})
		},
	}
}

func healthRequest(ctx context.Context, cmd *cli.Command, method, path string, arguments url.Values) error {
	answer, err := callControl(ctx, cmd, method, path, arguments)
	if err != nil {
		return err
	}
	var report sharing.HealthReport
	if err := json.Unmarshal(answer, &report); err != nil {
		return fmt.Errorf("read the answer of virgate run: %w", err)
	}
	var units []string
	for _, unit := range report.Units {
		units = append(units, unit.Unit)
	}
	return show(cmd, json.RawMessage(answer), units, func(out *text) { out.health(report) })
}

func (t *text) health(report sharing.HealthReport) {
	table := t.Table("GPU", "UNIT", "STATE", "SINCE", "REASON", "EXPLANATION")
	for _, u := range report.Units {
		table.Row(u.Index, u.Unit, u.State, u.Since.Format(time.RFC3339), u.Reason, u.Explanation)
	}
	table.End()
	for _, m := range report.Monitors {
		if pending := m.RowRemapPending; pending != nil && *pending {
			t.Line("row remapping: a memory row of %s waits for a reset; work goes on unharmed", m.GPU)
		}
		if m.Advice != "" {
			t.Line("advice: the driver asks for %s of %s, which is no fault: its devices stay in use", m.Advice, m.GPU)
		}
		if m.Degraded != "" {
			t.Line("degraded: %s is watched by probes alone: %s", m.GPU, m.Degraded)
		}
	}
}

func simCommand() *cli.Command {
	command := &cli.Command{
		Name:  "sim",
		Usage: "breaks and heals a running simulated node",
		Description: "Talks to the virgate run --node sim:… on the same machine.\n\n" +
			"Example: virgate sim --control-socket /tmp/control.sock xid --gpu 0 79",
		Flags: flagTable.Of(nil, "client/control-socket"),
	}
	for _, verb := range simnode.Verbs() {
		command.Commands = append(command.Commands, verbCommand(verb))
	}
	return command
}

// verbCommand returns the command for one verb of a simulated node.
func verbCommand(verb simnode.Verb) *cli.Command {
	verbCommand := &cli.Command{Name: verb.Name, Usage: verb.Usage}
	var positional []simnode.Argument
	var words []string
	for _, argument := range verb.Arguments {
		if argument.Positional {
			positional = append(positional, argument)
			words = append(words, strings.ToUpper(argument.Name))
			continue
		}
		verbCommand.Flags = append(verbCommand.Flags, &cli.StringFlag{
			Name:     argument.Name,
			Usage:    argument.Usage,
			Required: !argument.Optional,
		})
	}
	verbCommand.ArgsUsage = strings.Join(words, " ")
	verbCommand.Action = func(ctx context.Context, cmd *cli.Command) error {
		if given := cmd.Args().Len(); given > len(positional) {
			return command.Usage(fmt.Errorf("sim %s: unexpected %q", verb.Name, cmd.Args().Get(len(positional))))
		}
		arguments := url.Values{}
		for i, given := range cmd.Args().Slice() {
			arguments.Set(positional[i].Name, given)
		}
		for _, argument := range verb.Arguments {
			if !argument.Positional && cmd.IsSet(argument.Name) {
				arguments.Set(argument.Name, cmd.String(argument.Name))
			}
		}
		_, err := callControl(ctx, cmd, http.MethodPost, "/sim/"+verb.Name, arguments)
		return err
	}
	return verbCommand
}

// callControl sends a request to the program behind the control socket and returns its answer. If
// the program answers with an error, that is the error.
func callControl(ctx context.Context, cmd *cli.Command, method, path string, arguments url.Values) ([]byte, error) {
	socket := cmd.String("control-socket")
	code, answer, err := fetch(ctx, method, "http://virgate"+path+"?"+arguments.Encode(),
		func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		})
	switch {
	case err != nil:
		return nil, fmt.Errorf("no Virgate answers at %s: %w%s", socket, err, onCluster(cmd, "control-socket"))
	case code != http.StatusOK && code != http.StatusNoContent:
		return nil, errors.New(strings.TrimSpace(string(answer)))
	}
	return answer, nil
}

// onCluster returns the end of an error about a program that was not found at the default place; ""
// if the flag named another place.
func onCluster(cmd *cli.Command, flag string) string {
	if cmd.IsSet(flag) {
		return ""
	}
	return "; on a cluster: kubectl -n virgate exec POD -- " + cmd.FullName()
}

// longestAnswer limits the answer of a running program, in bytes.
const longestAnswer = 4 << 20

// fetch sends a request. dial replaces the usual way to connect; nil keeps it.
func fetch(
	ctx context.Context,
	method, address string,
	dial func(ctx context.Context, network, address string) (net.Conn, error),
) (code int, answer []byte, err error) {
	request, err := http.NewRequestWithContext(ctx, method, address, nil)
	if err != nil {
		return 0, nil, err
	}
	transport := &http.Transport{DialContext: dial}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Do(request)
	if failed := (*url.Error)(nil); errors.As(err, &failed) {
		err = failed.Err // The URL would repeat the address, or show one that the user never typed.
	}
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	answer, err = io.ReadAll(io.LimitReader(response.Body, longestAnswer))
	return response.StatusCode, answer, err
}
