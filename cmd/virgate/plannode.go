package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

// nodeChoice chooses the profile of one Node from a ConfigMap manifest, as virgate run does.
type nodeChoice struct {
	cmd       *cli.Command
	overrides configs.Overrides
	fallbacks []configsource.Fallback
	labels    map[string]string
	// inventory are the labels of the GPUs; nil if they are not known.
	inventory map[string]string
}

// planChoice is the chosen profile, and why it was chosen.
type planChoice struct {
	Profile string `json:"profile,omitempty"`
	By      string `json:"by"`
	Rule    int    `json:"rule,omitempty"`
	Layout  string `json:"layout,omitempty"`
}

func (p planChoice) String() string {
	text := nodereport.ProfileRef{Name: p.Profile, By: p.By}.Chosen()
	if p.Layout != "" {
		text += ", with the MIG layout " + p.Layout
	}
	return text
}

// newNodeChoice reads the Node's labels; nil if none were requested.
func newNodeChoice(ctx context.Context, cmd *cli.Command, overrides configs.Overrides) (*nodeChoice, error) {
	if !cmd.IsSet("labels") && !cmd.IsSet("node-object") {
		return nil, nil
	}
	switch {
	case cmd.String("config") == "":
		return nil, command.Usage(errors.New(
			"--labels and --node-object need --config, a ConfigMap manifest with profiles"))
	case cmd.String("config-key") != "":
		return nil, command.Usage(errors.New(
			"--config-key names the profile that --labels and --node-object are to choose: leave it out"))
	case cmd.String("node-object") == configsource.Stdin &&
		(cmd.String("config") == configsource.Stdin || cmd.String("from") == configsource.Stdin):
		return nil, command.Usage(errors.New(
			"--node-object and a profile are both standard input, which can be read once"))
	}
	c := &nodeChoice{
		cmd:       cmd,
		overrides: overrides,
		labels:    map[string]string{},
	}
	var err error
	c.fallbacks, err = configsource.ParseFallbacks(cmd.String("fallback-strategies"))
	if err != nil {
		return nil, command.Usage(fmt.Errorf("--fallback-strategies: %w", err))
	}
	if object := cmd.String("node-object"); object != "" {
		found, err := nodeObjectLabels(ctx, object, cmd.String("kubeconfig"))
		if err != nil {
			return nil, err
		}
		maps.Copy(c.labels, found)
	}
	given, err := labels.ConvertSelectorToLabelsMap(cmd.String("labels"))
	if err != nil {
		return nil, command.Usage(fmt.Errorf("--labels: %w", err))
	}
	maps.Copy(c.labels, given)
	return c, nil
}

// nodeObjectLabels returns the labels of the Node in a file, or of the Node of that name in the
// cluster.
func nodeObjectLabels(ctx context.Context, object, kubeconfig string) (map[string]string, error) {
	node := corev1.Node{}
	if _, err := os.Stat(object); object != configsource.Stdin && errors.Is(err, os.ErrNotExist) &&
		!strings.ContainsAny(object, "/") && !strings.HasSuffix(object, ".yaml") &&
		!strings.HasSuffix(object, ".json") {
		config, _, err := kube.UserConfig(kubeconfig, "")
		if err != nil {
			return nil, fmt.Errorf("--node-object %s: there is no such file, and the cluster is not known: %w", object,
				err)
		}
		config.UserAgent = "virgate-plan"
		return nodestatus.NodeLabels(ctx, config, object)
	}
	data, err := configsource.Read(ctx, object)
	if err != nil {
		return nil, fmt.Errorf("read --node-object: %w", err)
	}
	if err := yaml.Unmarshal(data, &node); err != nil {
		return nil, fmt.Errorf("read --node-object: %s: %w", configsource.Name(object), err)
	}
	if node.Kind != "Node" {
		return nil,
			fmt.Errorf("read --node-object: %s: expected kind Node, as of kubectl get node NAME -o yaml (got %q)",
				configsource.Name(object), node.Kind)
	}
	return node.Labels, nil
}

// see uses the labels of these GPUs, and the Node's labels about its machine; without those, this
// machine's if the GPUs are. If the GPUs could not be read, it uses the Node's labels that feature
// discovery wrote.
func (c *nodeChoice) see(library nvml.Library, gpus []sharing.GPU, unread error) {
	if unread == nil {
		n := features.Node{GPUs: gpus}
		if source := c.cmd.String("node"); source == "auto" || source == "nvml" {
			silent := slog.New(slog.DiscardHandler)
			n.Machine = machineName(machineTypeFile, silent)
			n.VGPUs = vgpus(os.DirFS(pciDevices), silent)
		}
		if library.Init() == nil {
			versions := nvml.ReadVersions(library)
			n.Driver, n.CUDA = versions.Driver, versions.CUDA
			_ = library.Shutdown() // It was closed before.
		}
		c.inventory = daemon.RuleLabels(n)
		for name, value := range c.labels {
			if name == "nvidia.com/gpu.machine" || strings.HasPrefix(name, "nvidia.com/vgpu.") {
				c.inventory[name] = value
			}
		}
		return
	}
	for name, value := range c.labels {
		if configs.InventoryLabel(name) {
			if c.inventory == nil {
				c.inventory = map[string]string{}
			}
			c.inventory[name] = value
		}
	}
}

// showChoice shows what was chosen for a node whose GPUs are not on this machine.
func showChoice(cmd *cli.Command, choice planChoice, unread error) error {
	warning := fmt.Sprintf(
		"what it would offer is not known, because the GPUs cannot be read: name others with --node: %v", unread)
	report := planReport{
		Summary: sharing.Summary{Resources: []sharing.ResourceSummary{}, Warnings: []string{warning}},
		Choice:  &choice,
	}
	return report.show(cmd, "")
}

// differing returns warnings about labels of the Node that differ from those of the GPUs. Such
// labels of the Node do not count.
func (c *nodeChoice) differing() (warnings []string) {
	for _, name := range slices.Sorted(maps.Keys(c.labels)) {
		if is, value := c.inventory[name], c.labels[name]; configs.InventoryLabel(name) && is != value {
			warnings = append(warnings, fmt.Sprintf("label %s=%s does not count: the GPUs of --node have %s", name,
				value, cmp.Or(is, "none")))
		}
	}
	return warnings
}

// read chooses the profile in the file at that path.
func (c *nodeChoice) read(ctx context.Context, path string) (configs.Config, planChoice, error) {
	name := configsource.Name(path)
	data, err := configsource.Read(ctx, path)
	if err != nil {
		return configs.Config{}, planChoice{}, fmt.Errorf("read profile: %w", err)
	}
	file, err := configs.ParseFile(name, data, c.overrides)
	if err != nil {
		return configs.Config{}, planChoice{}, err
	}
	if len(file.Entries) == 0 {
		return configs.Config{}, planChoice{},
			fmt.Errorf(
				"%s: --labels and --node-object choose among the profiles of a ConfigMap manifest or of Helm values, "+
					"and this is one %s", name, file.Kind)
	}
	label := c.cmd.String("node-label")
	criteria := configsource.Criteria{
		LabelName:  label,
		Label:      c.labels[label],
		NodeLabels: c.labels,
		Inventory:  c.inventory,
		Source:     name,
		Default:    c.cmd.String("default-config"),
		Fallbacks:  c.fallbacks,
	}
	for _, entry := range file.Entries {
		switch {
		case entry.Kind == configs.KindProfile:
			criteria.Names = append(criteria.Names, entry.Name)
		case entry.Kind == configs.KindRules && criteria.Rules.List != nil:
			return configs.Config{}, planChoice{},
				fmt.Errorf("%s: it has several lists of rules: leave one of them in the file", name)
		case entry.Kind == configs.KindRules:
			criteria.Rules = entry.Rules
			// It only matters that there are some.
			criteria.Rules.Generation = cmp.Or(entry.Rules.Generation, configs.RulesName)
		}
	}
	chosen, err := configsource.Choose(criteria)
	if err != nil {
		return configs.Config{}, planChoice{}, fmt.Errorf("%s: %w", name, err)
	}
	choice := planChoice{
		Profile: chosen.Name,
		By:      chosen.Choice.By,
		Rule:    chosen.Choice.Rule,
	}
	var config configs.Config
	if chosen.Name == "" {
		config, err = configs.Parse("", nil, c.overrides)
	} else {
		config, err = file.Select(chosen.Name)
	}
	if err != nil {
		return configs.Config{}, choice, err
	}
	selected := config.SelectedFrom(name, chosen.Name, nil)
	if own := c.labels[configsource.MIGLabel]; own != "" {
		selected, err = selected.SelectMIG(own)
	} else {
		choice.Layout = chosen.Layout
		selected, err = selected.SelectRuleMIG(chosen.Layout)
	}
	if err != nil {
		return configs.Config{}, choice, fmt.Errorf("%s: %s: %w", name, choice, err)
	}
	return selected.Config, choice, nil
}
