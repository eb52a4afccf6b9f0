package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/wake"
)

func gpuCommand() *cli.Command {
	verb := func(name, usage, description string, flags ...string) *cli.Command {
		return &cli.Command{
			Name:        name,
			Usage:       usage,
			Description: description + "\n\nExample: virgate gpu " + name + " --gpu 0",
			Flags:       flagTable.Of(nil, append(flags, "gpu")...),
			Action:      func(ctx context.Context, cmd *cli.Command) error { return changeRelease(ctx, cmd, name) },
		}
	}
	return &cli.Command{
		Name:  "gpu",
		Usage: "releases a GPU of a running Virgate, so that it can be reset, and takes it back",
		Description: "Without a subcommand it shows the GPUs that are released, or were since that Virgate started.\n" +
			"Talks to the virgate run on the same machine.\n\n" +
			"Example: virgate gpu",
		Flags: append(flagTable.Of(nil, "client/control-socket"), command.OutputFlag()),
		Commands: []*cli.Command{
			verb("release", "withdraws a GPU, waits for its holders and closes what keeps it from being reset",
				"When it ends with exit code 0, Virgate has nothing of the GPU open, and nvidia-smi --gpu-reset\n"+
					"can run, unless other programs have it open. Run again, it sets a new time.", "for", "gpu/wait"),
			verb("restore", "takes a released GPU back before its time is over",
				"It is offered again as its health allows."),
			verb("reset", "releases a GPU, resets it with the driver's nvidia-smi and takes it back",
				"The running Virgate has to allow it: --allow-gpu-reset, the chart's mig.reset.", "for"),
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			list, err := askReleases(ctx, cmd, http.MethodGet, "", nil)
			if err != nil {
				return err
			}
			var gpus []string
			for _, r := range list {
				gpus = append(gpus, r.GPU)
			}
			return show(cmd, list, gpus, func(out *text) {
				table := out.Table("GPU", "UUID", "STATE", "UNTIL", "WAITS FOR")
				for _, r := range list {
					table.Row(r.Index, r.GPU, r.State, r.Until.UTC().Format(time.RFC3339), strings.Join(r.Waits, ", "))
				}
				table.End()
			})
		},
	}
}

// askReleases gets the releases of the running program, or makes it change one.
func askReleases(
	ctx context.Context,
	cmd *cli.Command,
	method, verb string,
	arguments url.Values,
) (list []release.Release, err error) {
	answer, err := callControl(ctx, cmd, method, "/gpu"+verb, arguments)
	if err != nil {
		return nil, err
	}
	if method == http.MethodPost {
		answer = slices.Concat([]byte("["), answer, []byte("]"))
	}
	if err := json.Unmarshal(answer, &list); err != nil {
		return nil, fmt.Errorf("read the answer of virgate run: %w", err)
	}
	return list, nil
}

// changeRelease releases, resets or restores a GPU, and reports progress until that is done.
func changeRelease(ctx context.Context, cmd *cli.Command, verb string) error {
	arguments := url.Values{"gpu": {cmd.String("gpu")}}
	if verb != "restore" {
		arguments.Set("for", cmd.Duration("for").String())
	}
	list, err := askReleases(ctx, cmd, http.MethodPost, "/"+verb, arguments)
	if err != nil {
		return err
	}
	r := list[0]
	say := func(format string, arguments ...any) {
		fmt.Fprintf(cmd.Root().Writer, "GPU %d (%s) %s\n", r.Index, r.GPU,
			status.Plain(fmt.Sprintf(format, arguments...)))
	}
	var waits []string
	hinted := false
	for {
		switch {
		case verb == "release" && r.State == release.Released:
			say("is released until %s: nvidia-smi --gpu-reset -i %s can run; virgate gpu restore --gpu %d "+
				"takes it back", r.Until.UTC().Format("15:04:05 MST"), r.PCIBusID, r.Index)
			return nil
		case r.State != release.Restored:
		case verb == "restore":
			say("is taken back")
			return nil
		case r.WasReset:
			say("was reset and is taken back")
			if r.Problem != "" {
				return errors.New(r.Problem)
			}
			return nil
		case r.Problem != "":
			return errors.New("not reset, and taken back: " + r.Problem)
		default:
			return fmt.Errorf("taken back: %s is over, or virgate gpu restore ended it", cmd.Duration("for"))
		}
		if verb != "restore" && len(r.Waits) > 0 && !slices.Equal(r.Waits, waits) {
			waits = r.Waits
			say("waits for: %s", strings.Join(waits, ", "))
			unknown := func(w string) bool { return strings.HasPrefix(w, release.HoldersUnknown) }
			if !hinted && slices.ContainsFunc(waits, unknown) {
				hinted = true
				say("waits until a kubelet answers: on a machine without a kubelet, end virgate run instead")
			}
		}
		if verb == "release" && !cmd.Bool("wait") && len(waits) > 0 &&
			!slices.Equal(waits, []string{release.Withdrawing}) {
			return command.ErrSilent
		}
		if !wake.Sleep(ctx, 200*time.Millisecond) {
			goes := "goes on being released"
			if r.Reset {
				goes = "is still reset when no program uses it, and released"
			}
			say(goes+" until %s: virgate gpu restore --gpu %d ends that", r.Until.UTC().Format("15:04:05 MST"), r.Index)
			return command.ErrSilent
		}
		list, err = askReleases(ctx, cmd, http.MethodGet, "", nil)
		if err != nil {
			return err
		}
		at := slices.IndexFunc(list, func(other release.Release) bool { return other.GPU == r.GPU })
		if at < 0 {
			return errors.New("the running Virgate was restarted, and the release is over")
		}
		r = list[at]
	}
}
