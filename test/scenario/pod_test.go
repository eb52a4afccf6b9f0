package scenario

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/simkubelet"
)

const (
	namespace = "scenario"
	container = "main"
)

func (c *call) pod() error {
	name := c.take()
	requests := map[string]int{}
	for len(c.arguments) > 0 {
		resource, text, ok := strings.Cut(c.arguments[0], "=")
		count, err := strconv.Atoi(text)
		if !ok || err != nil {
			break
		}
		requests[resource] = count
		c.take()
	}
	if len(requests) == 0 || c.not != (len(c.arguments) == 1) {
		return errUsage
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := c.kubelet.AddPod(ctx, simkubelet.Pod{
		Namespace: namespace, Name: name, Containers: []simkubelet.Container{{Name: container, Requests: requests}},
	})
	if !c.not {
		return err
	}
	var refused *simkubelet.AdmissionError
	if !errors.As(err, &refused) {
		return fmt.Errorf("pod %s was not refused: %w", name, err)
	}
	pattern, err := c.pattern()
	if err == nil && !pattern.MatchString(refused.Message) {
		err = fmt.Errorf("pod %s was refused with %q", name, refused.Message)
	}
	return err
}

func (c *call) deletePod() error { return c.kubelet.DeletePod(namespace, c.take()) }

func (c *call) restartContainer() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := c.kubelet.RestartContainer(ctx, namespace, c.take(), container)
	return err
}

// status is the container of a running pod.
func status(k simkubelet.Snapshot, name string) (simkubelet.ContainerStatus, error) {
	i := slices.IndexFunc(k.Pods, func(p simkubelet.PodStatus) bool { return p.Name == name })
	switch {
	case i < 0:
		return simkubelet.ContainerStatus{}, fmt.Errorf("no pod %s", name)
	case k.Pods[i].Phase != simkubelet.Running:
		return simkubelet.ContainerStatus{}, fmt.Errorf("pod %s is %s: %s", name, k.Pods[i].Phase, k.Pods[i].Message)
	}
	running, _ := k.Pods[i].Container(container)
	return running, nil
}

func (c *call) holds() error {
	name, health := c.take(), c.take()
	if health != "" && health != "healthy" && health != "unhealthy" {
		return errUsage
	}
	running, err := status(c.kubelet.Snapshot(), name)
	if err != nil {
		return err
	}
	var held []string
	for _, grant := range running.Grants {
		for _, id := range grant.Devices {
			held = append(held, grant.Resource+" "+id)
		}
	}
	if len(held) == 0 {
		return fmt.Errorf("pod %s holds nothing", name)
	}
	if c.held[name] == nil {
		c.held[name] = held
	}
	if diff := cmp.Diff(c.held[name], held); diff != "" {
		return fmt.Errorf("pod %s has other devices (-before +now):\n%s", name, diff)
	}
	return c.await(func(k simkubelet.Snapshot) bool {
		listed := map[string]bool{}
		for resource, r := range k.Resources {
			for _, d := range r.Devices {
				listed[resource+" "+d.ID] = health == "" || d.Healthy == (health == "healthy")
			}
		}
		return !slices.ContainsFunc(held, func(device string) bool { return !listed[device] })
	})
}

// visible is what the pod's container has in NVIDIA_VISIBLE_DEVICES.
func (c *call) visible(name string) (string, error) {
	running, err := status(c.kubelet.Snapshot(), name)
	return running.Env()["NVIDIA_VISIBLE_DEVICES"], err
}

func (c *call) sees() error {
	visible, err := c.visible(c.take())
	if err != nil {
		return err
	}
	got := strings.Split(visible, ",")
	want := make([]string, len(c.arguments))
	for i, index := range c.arguments {
		if want[i], err = c.unitID(index); err != nil {
			return err
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("the container sees other units (-want +got):\n%s", diff)
	}
	return nil
}

func (c *call) granted() error {
	visible, err := c.visible(c.take())
	if err != nil {
		return err
	}
	pattern, err := regexp.Compile(c.take())
	if err == nil && !pattern.MatchString(visible) {
		err = fmt.Errorf("NVIDIA_VISIBLE_DEVICES=%s", visible)
	}
	return err
}
