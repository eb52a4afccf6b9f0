package main

import (
	"context"
	"errors"
	"log/slog"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/sharing"
)

// podContainers are the containers of this node's pods, as the API server has
// them.
type podContainers struct{ *policy.Pods }

// watchPods is what the flags say of them; nil when they are not to be watched.
func watchPods(cmd *cli.Command, log *slog.Logger) (*podContainers, error) {
	if !cmd.Bool("watch-pods") {
		return nil, nil
	}
	node := cmd.String("node-name")
	if node == "" {
		return nil, usageError{errors.New("--watch-pods: --node-name is missing")}
	}
	api, err := newAPI(cmd)
	if err != nil {
		return nil, err
	}
	return &podContainers{policy.NewPods(api, node, log)}, nil
}

// run follows the pods until ctx ends. The sampler looks when it samples.
func (p *podContainers) run(ctx context.Context) error {
	return p.Watch(ctx, func() {})
}

// source is nil where nothing is watched.
func (p *podContainers) source() usage.Containers {
	if p == nil {
		return nil
	}
	return p
}

// Containers implements usage.Containers.
func (p *podContainers) Containers() (map[string]sharing.Container, error) {
	list, err := p.Pods.Containers()
	if list == nil {
		return nil, err
	}
	return byID(list), err
}

// byID has the containers by their ID without the runtime's name before it.
func byID(list []policy.Container) map[string]sharing.Container {
	containers := make(map[string]sharing.Container, len(list))
	for _, c := range list {
		_, id, _ := strings.Cut(c.ID, "://")
		containers[id] = sharing.Container{Namespace: c.Namespace, Pod: c.Pod, Name: c.Name}
	}
	return containers
}
