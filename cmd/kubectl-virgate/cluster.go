package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/status"
)

// clusterCommands returns the commands that show the cluster; the first is the default.
func clusterCommands() []*cli.Command {
	part := func(name, usage string, show func(*text, cluster.View, bool),
		of func(cluster.View) (list any, names []string)) *cli.Command {
		return &cli.Command{
			Name:          name,
			Usage:         usage,
			ArgsUsage:     "[NODE...]",
			ShellComplete: completeNode,
			Action: func(ctx context.Context, cmd *cli.Command) error {
				return lookAtCluster(ctx, cmd, show, of)
			},
		}
	}
	return []*cli.Command{
		part("nodes", "shows nodes with profile, state, resources and MIG layouts", (*text).clusterNodes,
			func(v cluster.View) (any, []string) {
				return v.Nodes, namesOf(v.Nodes, func(n cluster.NodeView) string { return "node/" + n.Name })
			}),
		part("gpus", "shows each GPU and partition: model, how it is shared, health, use and holders",
			(*text).clusterGPUs, func(v cluster.View) (any, []string) {
				return v.GPUs, namesOf(v.GPUs, func(g cluster.GPUView) string { return g.ID })
			}),
		part("tenants", "shows which namespaces share GPUs with which", (*text).clusterTenants,
			func(v cluster.View) (any, []string) {
				return v.Tenants, namesOf(v.Tenants,
					func(t cluster.TenantView) string { return "namespace/" + t.Namespace })
			}),
		clusterWhyCommand(),
	}
}

// completeNode prints the names of all Nodes, unless the API server is slow.
func completeNode(ctx context.Context, cmd *cli.Command) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	config, _, err := kube.UserConfig(cmd.String("kubeconfig"), cmd.String("context"))
	if err != nil {
		return
	}
	names, _ := nodestatus.NodeNames(ctx, config)
	for _, name := range names {
		_, _ = fmt.Fprintln(cmd.Root().Writer, status.Plain(name))
	}
}

func namesOf[T any](list []T, name func(T) string) []string {
	names := make([]string, len(list))
	for i, item := range list {
		names[i] = name(item)
	}
	return names
}

// clusterOptions returns the options from the flags, and a client for the API server.
func clusterOptions(cmd *cli.Command) (options cluster.Options, client *cluster.Client, namespace string, err error) {
	options = cluster.Options{
		Selector:      cmd.String("selector"),
		Names:         cmd.Args().Slice(),
		Domain:        cmd.String("domain"),
		Namespace:     cmd.String("virgate-namespace"),
		StatusTimeout: cmd.Duration("status-timeout"),
		AllTimeout:    cmd.Duration("all-timeout"),
	}
	switch {
	case options.StatusTimeout < 0:
		return options, nil, "", command.Usage(fmt.Errorf("--status-timeout must not be less than 0, got %s",
			options.StatusTimeout))
	case options.AllTimeout <= 0:
		return options, nil, "", command.Usage(fmt.Errorf("--all-timeout must be more than 0, got %s",
			options.AllTimeout))
	case options.Domain == "" || strings.Contains(options.Domain, "/"):
		return options, nil, "", command.Usage(fmt.Errorf("--domain: expected a domain such as nvidia.com, got %q",
			options.Domain))
	}
	config, namespace, err := kube.UserConfig(cmd.String("kubeconfig"), cmd.String("context"))
	if err == nil {
		client, err = cluster.NewClient(config)
	}
	return options, client, namespace, err
}

// lookAtCluster reads the cluster once and prints the result.
func lookAtCluster(
	ctx context.Context,
	cmd *cli.Command,
	table func(*text, cluster.View, bool),
	of func(cluster.View) (any, []string),
) error {
	if err := serveAlone(cmd); err != nil {
		return err
	}
	options, client, _, err := clusterOptions(cmd)
	if err != nil {
		return err
	}
	if cmd.IsSet("serve") {
		return serveCluster(ctx, cmd.Root().ErrWriter, cmd.String("serve"), client.NewWatcher(options))
	}
	began := time.Now()
	requests := func() {
		if cmd.Bool("verbose") {
			_, _ = fmt.Fprintf(cmd.Root().ErrWriter, "%d requests for lists and rights, %d for status pages, in %s\n",
				client.Lists.Load(), client.Pages.Load(), time.Since(began).Round(time.Millisecond))
		}
	}
	if cmd.Bool("watch") {
		defer requests()
		return watchCluster(ctx, cmd, client.NewWatcher(options), table, of)
	}
	snapshot, err := client.Read(ctx, options)
	requests()
	if err != nil {
		return err
	}
	view := cluster.NewView(snapshot)
	list, names := of(view)
	if command.ForPeople(cmd) {
		switch {
		case len(view.Nodes) > 0:
		case options.Selector == "":
			view.Notes = append(view.Notes, "no node has a resource of "+options.Domain+" or a report of Virgate")
		default:
			view.Notes = append(view.Notes, "no node with GPUs has the labels "+options.Selector)
		}
		for _, note := range view.Notes {
			_, _ = fmt.Fprintln(cmd.Root().ErrWriter, "note:", status.Plain(note))
		}
	}
	return show(cmd, clusterDocument(cmd, view, list), names, func(out *text) { table(out, view, command.Wide(cmd)) })
}

// clusterPart returns what the command shows: nodes without a subcommand.
func clusterPart(cmd *cli.Command) string {
	if slices.Contains([]string{"gpus", "tenants", "why"}, cmd.Name) {
		return cmd.Name
	}
	return "nodes"
}

// clusterDocument returns the document for -o json and yaml.
func clusterDocument(cmd *cli.Command, view cluster.View, list any) map[string]any {
	document := map[string]any{
		"at":             view.At,
		clusterPart(cmd): list,
		"notes":          view.Notes,
	}
	if clusterPart(cmd) == "nodes" {
		document["rules"] = view.Rules
	}
	return document
}

// clusterNodes prints a line for each resource of each node. If rules choose profiles, it also
// prints one for each rule.
func (t *text) clusterNodes(v cluster.View, wide bool) {
	header := []any{
		"NODE", "WANTED", "APPLIED", "STATE", "GPUS", "RESOURCE", "ALLOCATABLE", "HELD", "FREE", "UNHEALTHY", "LAYOUT",
	}
	if len(v.Rules) > 0 {
		header = slices.Insert(header, 2, any("BY"))
	}
	if wide {
		header = append(header, "MODEL", "GENERATION", "SOURCE", "HEARTBEAT")
	}
	table := t.Table(append(header, "NOTE")...)
	for _, n := range v.Nodes {
		gpus := "?"
		if n.GPUs != nil {
			gpus = strconv.Itoa(*n.GPUs)
		}
		var notes []string
		if n.Problem != "" {
			notes = append(notes, n.Problem)
		}
		if n.Delayed != nil {
			notes = append(notes, "takes the changed ConfigMap at "+n.Delayed.UTC().Format(time.RFC3339))
		}
		if n.Unread != "" && n.Unread != n.Problem {
			notes = append(notes, "status not read: "+n.Unread)
		}
		resources := n.Resources
		if len(resources) == 0 {
			resources = []cluster.ResourceView{{}}
		}
		for i, r := range resources {
			cells := []any{
				n.Name, cmp.Or(n.Wanted, "-"), cmp.Or(n.Applied.Name, n.Applied.Generation, "-"),
				cmp.Or(string(n.State), "-"), gpus,
			}
			if len(v.Rules) > 0 {
				cells = slices.Insert(cells, 2, any(byText(n.By, wide)))
			}
			if r.Name == "" {
				cells = append(cells, "-", "-", "-", "-", "-")
			} else {
				cells = append(cells, r.Name, r.Allocatable, count(r.Held), count(r.Free), r.Unhealthy)
			}
			cells = append(cells, layoutText(n))
			if wide {
				heartbeat := "-"
				if n.Heartbeat != nil {
					heartbeat = v.At.Sub(*n.Heartbeat).Round(time.Second).String() + " ago"
				}
				cells = append(cells, cmp.Or(strings.Join(n.Models, ", "), "-"), cmp.Or(n.Applied.Generation, "-"),
					cmp.Or(n.Applied.Source, "-"), heartbeat)
			}
			note := ""
			if i == 0 {
				note = oneLine(strings.Join(notes, "; "), wide)
			}
			table.Row(append(cells, note)...)
		}
	}
	table.End()
	t.clusterRules(v.Rules, wide)
}

// clusterRules prints a line for each rule or other reason why nodes have their profiles.
func (t *text) clusterRules(rules []cluster.RuleView, wide bool) {
	if len(rules) == 0 {
		return
	}
	t.Line("")
	table := t.Table("CHOSEN BY", "PROFILE", "NODES", "APPLIED", "REJECTED", "DELAYED", "LIST", "WHY REJECTED")
	for _, r := range rules {
		table.Row(r.By, cmp.Or(r.Profile, "-"), r.Nodes, r.Applied, r.Rejected, r.Delayed, r.Rules,
			oneLine(cmp.Or(strings.Join(r.Problems, "; "), "-"), wide))
	}
	table.End()
}

// byText returns why a node has its profile; unless wide is set, in one or two words: "rule 2",
// "label", "default".
func byText(by string, wide bool) string {
	words := strings.FieldsFunc(by, func(r rune) bool { return r == ' ' || r == ':' })
	switch {
	case wide || len(words) < 2:
	case words[0] == "rule" || words[0] == "fallback":
		by = words[0] + " " + words[1]
	default:
		by = words[0]
	}
	return cmp.Or(by, "-")
}

func count(n *int64) string {
	if n == nil {
		return "?"
	}
	return strconv.FormatInt(*n, 10)
}

// layoutText returns "all-balanced" or "day 3/4: blocked", where the numbers count GPUs that have
// their layout.
func layoutText(n cluster.NodeView) string {
	if len(n.Layouts) == 0 {
		return cmp.Or(strings.TrimSpace(n.Layout+" "+n.LayoutState), "-")
	}
	var names []string
	applied, state := 0, nodereport.LayoutApplied
	for _, gpu := range n.Layouts {
		if !slices.Contains(names, gpu.Wanted) {
			names = append(names, gpu.Wanted)
		}
		if gpu.State == nodereport.LayoutApplied {
			applied++
		} else {
			state = gpu.State
		}
	}
	if state == nodereport.LayoutApplied {
		return strings.Join(names, ",")
	}
	return fmt.Sprintf("%s %d/%d: %s", strings.Join(names, ","), applied, len(n.Layouts), state)
}

// oneLine shortens a note to a line; with wide it keeps all of it.
func oneLine(note string, wide bool) string {
	note = strings.Join(strings.Fields(note), " ")
	if runes := []rune(note); len(runes) > 100 && !wide {
		return string(runes[:100]) + "…"
	}
	return note
}

func (t *text) clusterGPUs(v cluster.View, wide bool) {
	header := []any{"NODE", "GPU", "MODEL", "RESOURCE", "SHARING", "HELD", "USE", "MEMORY", "HEALTH"}
	if wide {
		header = append(header, "ID")
	}
	table := t.Table(append(header, "HOLDERS")...)
	for _, g := range v.GPUs {
		held := strconv.Itoa(g.Held)
		if g.Replicas > 0 {
			held += "/" + strconv.Itoa(g.Replicas)
		}
		use, memory := "-", "-"
		if g.Use != nil && g.Use.SM != nil {
			use = fmt.Sprintf("%.0f%%", 100**g.Use.SM)
		}
		if g.Use != nil && g.Use.Memory != nil {
			memory = fmt.Sprintf("%.1fGiB", *g.Use.Memory/(1<<30))
		}
		health := cmp.Or(g.Health, "-")
		if g.Reason != "" {
			health += ": " + oneLine(g.Reason, wide)
		}
		cells := []any{
			g.Node, cmp.Or(g.Index, g.ID), strings.TrimSpace(cmp.Or(g.Model, "-") + " " + g.Profile),
			cmp.Or(g.Resource, "-"), cmp.Or(g.Sharing, "-"), held, use, memory, health,
		}
		if wide {
			cells = append(cells, g.ID)
		}
		var holders []string
		for _, h := range g.Holders {
			if name := h.String(); !slices.Contains(holders, name) {
				holders = append(holders, name)
			}
		}
		table.Row(append(cells, cmp.Or(strings.Join(holders, " "), "-"))...)
	}
	table.End()
}

func (t *text) clusterTenants(v cluster.View, wide bool) {
	table := t.Table("NAMESPACE", "PODS", "WAITING", "GPUS", "RESOURCES", "SHARES WITH")
	pairs := func(counts map[string]int, format string) string {
		var texts []string
		for _, name := range slices.Sorted(maps.Keys(counts)) {
			texts = append(texts, fmt.Sprintf(format, name, counts[name]))
		}
		return cmp.Or(strings.Join(texts, " "), "-")
	}
	for _, tenant := range v.Tenants {
		resources := map[string]int{}
		for name, number := range tenant.Resources {
			resources[name] = int(number)
		}
		table.Row(tenant.Namespace, tenant.Pods, tenant.Waiting, tenant.Units, pairs(resources, "%s=%d"),
			pairs(tenant.SharesWith, "%s (%d)"))
	}
	table.End()
}
