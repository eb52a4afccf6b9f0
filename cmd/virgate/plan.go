package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

func planCommand(environment environment) *cli.Command {
	flags := flagTable.Of(environment, "[node]", "[plan]", "dra-nvidia-names", "[profile, read once]", "[plan labels]",
		"node-label", "default-config", "fallback-strategies", "kubeconfig")
	return &cli.Command{
		Name:  "plan",
		Usage: "shows what the node would advertise, without a kubelet",
		Description: "Reads the node's GPUs once and changes nothing.\n\n" +
			"With --labels or --node-object it chooses the profile as virgate run would on that Node: by its label,\n" +
			"else by the first rule that matches, else the default.\n\n" +
			"Example: virgate plan --node sim:dgx-a100 --config configs/examples/time-slicing-4.yaml",
		Flags: slices.Concat(flags, planFlags(), []cli.Flag{command.OutputFlag()}),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			overrides := overrides(cmd, environment)
			if err := checkPath(cmd, "config"); err != nil {
				return err
			}
			if cmd.String("config") == configsource.Stdin && cmd.String("from") == configsource.Stdin {
				return command.Usage(errors.New("--config and --from are both standard input, which can be read once"))
			}
			name := cmp.Or(configsource.Name(cmd.String("config")), "flags")
			chooser, err := newNodeChoice(ctx, cmd, overrides)
			if err != nil {
				return err
			}
			// A Node's profile can depend on its GPUs. Otherwise the profile determines how they
			// are opened.
			read := func(path string) (configs.Config, planChoice, error) {
				config, err := readConfig(ctx, path, cmd.String("config-key"), overrides)
				return config, planChoice{}, err
			}
			var config configs.Config
			var choice planChoice
			if chooser == nil {
				config, choice, err = readOffered(read, cmd.String("config"))
			} else {
				config, err = configs.Parse("", nil, overrides)
				read = func(path string) (configs.Config, planChoice, error) { return chooser.read(ctx, path) }
			}
			if err != nil {
				return err
			}
			node, err := openGPUs(cmd, config.Startup, textLog(cmd))
			if err != nil {
				return err
			}
			defer node.Close()
			gpus, unread := nvml.Scan(node.Library)
			if unread != nil && (chooser == nil || cmd.IsSet("node")) {
				return fmt.Errorf("read GPUs: %w", unread)
			}
			if chooser != nil {
				chooser.see(node.Library, gpus, unread)
				config, choice, err = readOffered(read, cmd.String("config"))
				if err != nil {
					return err
				}
				if unread != nil {
					return showChoice(cmd, choice, unread)
				}
			}
			if err := config.SelectedFrom(name, cmd.String("config-key"), nil).CheckNode(gpus); err != nil {
				return err
			}
			if cmd.Bool("dra") {
				return planDRA(ctx, cmd, config.Profile, node, gpus)
			}
			then, waits := gpus, []string(nil)
			if config.Profile.MIG.Manage {
				if list, err := readPartitions(ctx, node.Partitioner(nil), gpus); err != nil {
					waits = []string{unplanned(config.Profile.MIG, err)}
				} else {
					then, waits = afterChange(list, config.Profile.MIG)
				}
			}
			plan, divides := sharing.NewPlan(then, config.Profile), !reflect.DeepEqual(gpus, then)
			hints := plan.Grants.Conflicts(plan.Resources)
			if err := config.CheckMPS(); err != nil {
				path, _, _ := strings.Cut(err.Error(), ": ")
				hints = append(hints, path+": "+needsMPS)
			}
			for _, r := range plan.Resources {
				if !sharing.OperatorEvicts(r.Name) {
					hints = append(hints, r.Name+": "+sharing.NotEvicted)
				}
			}
			if chooser != nil {
				hints = append(hints, chooser.differing()...)
			}
			plan.Warnings = append(plan.Warnings, waits...)
			if !cmd.IsSet("from") {
				report := planReport{Summary: plan.Summary(), hints: hints}
				if chooser != nil {
					report.Choice = &choice
				}
				if divides {
					report.Now = new(sharing.NewPlan(gpus, config.Profile).Summary())
				}
				return report.show(cmd, config.Profile.MIG.Name)
			}
			older, before, err := read(cmd.String("from"))
			if err != nil {
				return err
			}
			changes := sharing.Diff(sharing.NewPlan(gpus, older.Profile), plan)
			if cmd.IsSet("addr") {
				if err := nameHolders(ctx, cmd.String("addr"), changes); err != nil {
					return err
				}
			}
			warnings := slices.Concat(explainWaits(changes), hints, plan.Warnings)
			if divides {
				warnings = append(warnings,
					"the MIG layout changes too, in the driver's time and when its GPUs are free: virgate mig plan "+
						"shows how")
			}
			report := changesReport{
				Changes:  append([]sharing.Change{}, changes...),
				Warnings: append([]string{}, warnings...),
			}
			if chooser != nil {
				report.ChoiceBefore, report.Choice = &before, &choice
			}
			var resources []string
			for _, c := range changes {
				resources = append(resources, c.Name)
			}
			return show(cmd, report, resources, func(out *text) {
				if chooser != nil {
					out.Line("before: %s\nthen:   %s\n", before, choice)
				}
				out.changes(changes)
				out.Warnings(warnings)
			})
		},
	}
}

// unplanned returns the warning for GPUs whose driver does not report what they can have.
func unplanned(wanted sharing.MIGConfig, err error) string {
	what := fmt.Sprintf("MIG layout %q", wanted.Name)
	if source := wanted.Source(); source != "" {
		what += ", " + source
	}
	return what + ": cannot be planned: " + err.Error()
}

// needsMPS is the note of check and plan about a profile that needs MPS daemons. They cannot know
// what runs on the node.
const needsMPS = "virgate run refuses this profile unless MPS runs on the node: set the chart's mps.enabled " +
	"(--mps-root)"

// readOffered reads the profile from the file at that path. A profile that offers nothing is an
// error.
func readOffered(
	read func(path string) (configs.Config, planChoice, error),
	path string,
) (configs.Config, planChoice, error) {
	config, choice, err := read(path)
	if err != nil {
		return config, choice, err
	}
	if err := config.CheckOffered(); err != nil {
		return config, choice, fmt.Errorf("%s: %w", cmp.Or(configsource.Name(path), "flags"), err)
	}
	return config, choice, nil
}

func readConfig(ctx context.Context, path, key string, overrides configs.Overrides) (configs.Config, error) {
	return (&configsource.File{
		Path:      path,
		Key:       key,
		Overrides: overrides,
		Done:      ctx.Done(),
	}).Config()
}

// planReport is what the node would advertise. Now, if set, is what it would advertise before its
// GPUs have their MIG layout. The hints are for people; the running program, whose plan is
// otherwise the same, does not give them.
type planReport struct {
	sharing.Summary
	hints []string
	Now   *sharing.Summary `json:"now,omitempty"`
	// Choice is the profile of a Node with the given labels; nil if none were given.
	Choice *planChoice `json:"choice,omitempty"`
}

func (r planReport) show(cmd *cli.Command, layout string) error {
	var resources []string
	for _, resource := range r.Resources {
		resources = append(resources, resource.Name)
	}
	return show(cmd, r, resources, func(out *text) {
		wide := command.Wide(cmd)
		if r.Choice != nil {
			out.Line("%s\n", r.Choice)
		}
		if r.Now != nil {
			out.Line("now:")
			out.planned(r.Now.Resources, wide)
			out.Line("\nwith the MIG layout %q:", layout)
		}
		if len(r.Resources) > 0 || r.Choice == nil {
			out.planned(r.Resources, wide)
		}
		out.Warnings(slices.Concat(r.hints, r.Warnings))
	})
}

// planned prints a row for each resource; with wide also how many devices are on which GPU.
func (t *text) planned(resources []sharing.ResourceSummary, wide bool) {
	header := []any{"RESOURCE", "STRATEGY", "REPLICAS", "UNITS", "DEVICES", "HEALTHY"}
	if wide {
		header = append(header, "GPU×DEVICES")
	}
	table := t.Table(header...)
	for _, r := range resources {
		replicas := strconv.Itoa(r.Replicas)
		if r.MaxReplicas > 0 {
			replicas += "-" + strconv.Itoa(r.MaxReplicas)
		}
		cells := []any{r.Name, r.Strategy, replicas, r.Units, r.Devices, r.Healthy}
		var gpus []string
		for _, gpu := range r.GPUs {
			gpus = append(gpus, fmt.Sprintf("%s×%d", gpu.Index, gpu.Devices))
		}
		if wide && gpus != nil {
			cells = append(cells, strings.Join(gpus, " "))
		}
		table.Row(cells...)
	}
	table.End()
	for _, r := range resources {
		if r.Share != nil {
			t.Line("%s: a share is %d %% of the multiprocessors and %d MiB of memory at most", r.Name,
				r.Share.ThreadPercentage, r.Share.PinnedMemory>>20)
		}
	}
}

// nameHolders gets from a running Virgate which pods hold the units that switch.
func nameHolders(ctx context.Context, address string, changes []sharing.Change) error {
	address, err := dialAddress(address)
	if err != nil {
		return command.Usage(fmt.Errorf("--addr: %w", err))
	}
	status, _, err := getStatus(ctx, address, "")
	if err != nil {
		return err
	}
	if !status.HoldersKnown {
		return fmt.Errorf("%s cannot read who holds what", address)
	}
	pods := map[string][]string{}
	for _, g := range status.GPUs {
		for _, u := range g.Units {
			for _, h := range u.Holders { // Sorted by pod.
				name := sharing.UnnamedHolder
				if h.Pod != "" {
					name = h.Namespace + "/" + h.Pod
				}
				pods[u.ID] = append(pods[u.ID], name)
			}
		}
	}
	for _, c := range changes {
		for i, s := range c.Switches {
			c.Switches[i].Pods = slices.Compact(append([]string{}, pods[s.Unit]...))
		}
	}
	return nil
}

// explainWaits adds to each change how long it takes and which pods it waits for, by the figures of
// docs/explanation/kubelet.md. It warns of shares that no pod can get meanwhile. If Pods is nil, it
// is not known whether there are any.
func explainWaits(changes []sharing.Change) (warnings []string) {
	var idle []string
	for i, c := range changes {
		var waits []string
		for _, s := range c.Switches {
			switch {
			case s.Pods == nil:
				waits = append(waits, s.Index)
			case len(s.Pods) > 0:
				waits = append(waits, s.Index+" ("+strings.Join(s.Pods, ", ")+")")
			default:
				continue
			}
			if s.IdleShares && !slices.Contains(idle, s.Index) {
				idle = append(idle, s.Index)
			}
		}
		switch {
		case len(waits) > 0:
			changes[i].Takes = "about 0.3 s where free; GPU " + strings.Join(waits, ", ") + " when the holders end"
		case len(c.Switches) > 0:
			changes[i].Takes = "about 0.3 s"
		case c.Kind == sharing.Shrinks:
			changes[i].Takes = "at once; shares in use beyond that stay until their pods end"
		default:
			changes[i].Takes = "at once"
		}
	}
	if len(idle) > 0 {
		warnings = []string{
			"GPU " + strings.Join(idle, ", ") +
				": while a pod holds a share, no other pod gets the idle ones, under either profile",
		}
	}
	return warnings
}

type changesReport struct {
	Changes  []sharing.Change `json:"changes"`
	Warnings []string         `json:"warnings"`
	// ChoiceBefore and Choice are the profiles of a Node with the given labels; nil if none were
	// given.
	ChoiceBefore *planChoice `json:"choiceBefore,omitempty"`
	Choice       *planChoice `json:"choice,omitempty"`
}

func (t *text) changes(changes []sharing.Change) {
	if len(changes) == 0 {
		t.Line("nothing changes")
	}
	table := t.Table()
	for _, c := range changes {
		what := string(c.Kind)
		if c.OldName != "" {
			what += " from " + c.OldName
		}
		table.Row(c.Name, what, fmt.Sprintf("%d → %d devices", c.Before, c.After), c.Takes)
	}
	table.End()
}
