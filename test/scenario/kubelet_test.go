package scenario

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/kubelettest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func (c *call) kubeletDoes() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	what, argument := c.take(), c.take()
	if what == "start" {
		if c.kubelet == nil {
			c.kubelet = kubelettest.New(simkubelet.Options{Dir: c.plugins(), PodResourcesSocket: c.podResources(), OnChange: c.record})
		}
		return c.kubelet.Start(ctx)
	}
	if c.kubelet == nil {
		return errors.New("the script has started no kubelet")
	}
	switch what {
	case "stop":
		return c.kubelet.Stop(ctx)
	case "restart":
		return c.kubelet.Restart(ctx)
	case "silent", "speaks":
		c.kubelet.HangRegister(what == "silent")
	case "refuse":
		times, err := strconv.Atoi(argument)
		c.kubelet.RefuseRegister(times)
		return err
	case "drop":
		if !c.kubelet.DropStream(argument) {
			return fmt.Errorf("the kubelet has no plugin for %q", argument)
		}
	case "wipe":
		return c.wipe()
	default:
		return errUsage
	}
	return nil
}

// record is called for every change of the kubelet.
func (s *stage) record(k simkubelet.Snapshot) {
	s.states.Lock()
	defer s.states.Unlock()
	if !maps.EqualFunc(s.latest.Resources, k.Resources, func(a, b simkubelet.Resource) bool { return slices.Equal(a.Devices, b.Devices) }) {
		s.passed = append(s.passed, k)
	}
	s.latest = k
}

// wipe removes the program's sockets; at least one must exist.
func (c *call) wipe() error {
	sockets, err := filepath.Glob(filepath.Join(c.plugins(), "virgate-*.sock"))
	if err == nil && len(sockets) == 0 {
		err = errors.New("there is no socket to wipe")
	}
	for _, socket := range sockets {
		err = errors.Join(err, os.Remove(socket))
	}
	return err
}

// fraction parses text such as "28/32".
func fraction(text string) (part, whole int, err error) {
	before, after, ok := strings.Cut(text, "/")
	part, err = strconv.Atoi(before)
	whole, wholeErr := strconv.Atoi(after)
	if !ok || err != nil || wholeErr != nil {
		return 0, 0, fmt.Errorf("%q is not like 28/32", text)
	}
	return part, whole, nil
}

func (c *call) shows() error {
	resource := c.take()
	allocatable, capacity, err := fraction(c.take())
	if err != nil {
		return err
	}
	return c.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[resource]
		return r.Allocatable == allocatable && r.Capacity == capacity
	})
}

func (c *call) unit() error {
	resource := c.take()
	id, err := c.unitID(c.take())
	if err != nil {
		return err
	}
	healthy, listed, err := fraction(c.take())
	if err != nil {
		return err
	}
	return c.await(func(k simkubelet.Snapshot) bool {
		sound, all := 0, 0
		for _, d := range k.Resources[resource].Devices {
			if unit, _, _ := sharing.ParseDeviceID(d.ID); unit != id {
				continue
			}
			all++
			if d.Healthy {
				sound++
			}
		}
		return sound == healthy && all == listed
	})
}

// unitID returns the UUID of the GPU (0) or partition (0:1) at the index.
func (c *call) unitID(index string) (string, error) {
	for _, gpu := range c.gpus {
		if index == strconv.Itoa(gpu.Index) {
			return gpu.UUID, nil
		}
		for _, partition := range gpu.Partitions {
			if index == fmt.Sprintf("%d:%d", gpu.Index, partition.Index) {
				return partition.UUID, nil
			}
		}
	}
	return "", fmt.Errorf("the node has no unit %q", index)
}

// streams waits until the counters reach the wanted values, because the kubelet counts an end a moment
// later. It fails if a counter exceeds its value.
func (c *call) streams() error {
	resource := c.take()
	want := map[string]int{}
	for len(c.arguments) > 0 {
		name, text, _ := strings.Cut(c.take(), "=")
		count, err := strconv.Atoi(text)
		if _, known := streamCounters(simkubelet.Resource{})[name]; err != nil || !known {
			return errUsage
		}
		want[name] = count
	}
	if err := c.await(func(k simkubelet.Snapshot) bool {
		got := streamCounters(k.Resources[resource])
		for name, count := range want {
			if got[name] < count {
				return false
			}
		}
		return true
	}); err != nil {
		return err
	}
	got := streamCounters(c.kubelet.Snapshot().Resources[resource])
	for name, count := range want {
		if got[name] != count {
			return fmt.Errorf("%s: %s=%d, want %d", resource, name, got[name], count)
		}
	}
	return nil
}

func streamCounters(r simkubelet.Resource) map[string]int {
	return map[string]int{
		"opened": r.StreamsOpened, "closed": r.StreamsClosed, "registrations": r.Registrations, "lists": r.Lists,
	}
}

func (c *call) mark() error {
	snapshot := c.kubelet.Snapshot()
	c.marked = &snapshot
	return nil
}

func (c *call) unchanged() error {
	if c.marked == nil {
		return errors.New("nothing is marked")
	}
	if diff := cmp.Diff(c.marked.Resources, c.kubelet.Snapshot().Resources); diff != "" {
		return fmt.Errorf("what the kubelet lists has changed (-before +now):\n%s", diff)
	}
	return nil
}

const (
	namespace = "scenario"
	container = "main"
)

func (c *call) pod() error {
	name := c.take()
	requests := map[string]int{}
	var claims []simkubelet.Claim
arguments:
	for len(c.arguments) > 0 {
		resource, text, ok := strings.Cut(c.arguments[0], "=")
		count, err := strconv.Atoi(text)
		driver, device, claimed := strings.Cut(strings.TrimPrefix(c.arguments[0], "claim:"), "/")
		switch {
		case claimed && strings.HasPrefix(resource, "claim:"):
			device, entry, _ := strings.Cut(device, ",")
			claims = append(claims, simkubelet.Claim{Name: "claim-of-" + name, Devices: []simkubelet.ClaimDevice{{Driver: driver, Pool: "node", Name: device, CDI: []string{entry}}}})
		case ok && err == nil:
			requests[resource] = count
		default:
			break arguments
		}
		c.take()
	}
	if len(requests)+len(claims) == 0 || c.not != (len(c.arguments) == 1) {
		return errUsage
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := c.kubelet.AddPod(ctx, simkubelet.Pod{
		Namespace: namespace, Name: name, Containers: []simkubelet.Container{{Name: container, Requests: requests, Claims: claims}},
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

// status returns the container of a running pod.
func status(k simkubelet.Snapshot, name string) (simkubelet.ContainerStatus, error) {
	i := slices.IndexFunc(k.Pods, func(p simkubelet.PodStatus) bool { return p.Name == name })
	switch {
	case i < 0:
		return simkubelet.ContainerStatus{}, fmt.Errorf("no pod %s", name)
	case k.Pods[i].Phase != simkubelet.Running:
		return simkubelet.ContainerStatus{}, fmt.Errorf("pod %s is %s: %s", name, k.Pods[i].Phase, k.Pods[i].Message)
	}
	for _, running := range k.Pods[i].Containers {
		if running.Name == container {
			return running, nil
		}
	}
	return simkubelet.ContainerStatus{}, nil
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

// visible returns NVIDIA_VISIBLE_DEVICES of the pod's container.
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

func (c *call) nodes() error {
	running, err := status(c.kubelet.Snapshot(), c.take())
	if err != nil {
		return err
	}
	var nodes []string
	for _, grant := range running.Grants {
		for _, device := range grant.Response.GetDevices() {
			nodes = append(nodes, device.HostPath)
		}
	}
	slices.Sort(nodes)
	pattern, err := regexp.Compile(c.take())
	if text := strings.Join(nodes, " "); err == nil && !pattern.MatchString(text) {
		err = fmt.Errorf("device nodes %s", text)
	}
	return err
}

func (c *call) allocate() error {
	resource, ids := c.take(), c.arguments
	var pattern *regexp.Regexp
	if c.not {
		if len(ids) == 0 {
			return errUsage
		}
		last := len(ids) - 1
		var err error
		if pattern, err = regexp.Compile(ids[last]); err != nil {
			return err
		}
		ids = ids[:last]
	}
	err := c.ask(resource, func(ctx context.Context, plugin api.DevicePluginClient) error {
		_, err := plugin.Allocate(ctx, &api.AllocateRequest{
			ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}},
		})
		return err
	})
	switch {
	case !c.not:
		return err
	case err == nil:
		return fmt.Errorf("%q were granted", ids)
	case !pattern.MatchString(err.Error()):
		return fmt.Errorf("refused with another error: %w", err)
	}
	return nil
}

// prefers repeats the question until the choice among the free devices is as wanted: nothing at the kubelet
// shows when a new policy is in force.
func (c *call) prefers() error {
	resource := c.take()
	size, err := strconv.Atoi(c.take())
	if err != nil {
		return errUsage
	}
	var want, got []string
	for len(c.arguments) > 0 {
		unit, err := c.unitID(c.take())
		if err != nil {
			return err
		}
		want = append(want, unit)
	}
	slices.Sort(want)
	err = c.ask(resource, func(ctx context.Context, plugin api.DevicePluginClient) error {
		for {
			response, err := plugin.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{
				ContainerRequests: []*api.ContainerPreferredAllocationRequest{{
					AvailableDeviceIDs: free(c.kubelet.Snapshot(), resource), AllocationSize: int32(size),
				}},
			})
			if err != nil {
				return err
			}
			got = nil
			for _, id := range response.ContainerResponses[0].DeviceIDs {
				unit, _, _ := sharing.ParseDeviceID(id)
				got = append(got, unit)
			}
			slices.Sort(got)
			if slices.Equal(slices.Compact(got), want) {
				return nil
			}
		}
	})
	if err != nil {
		return fmt.Errorf("%w; the last choice was of %s", err, got)
	}
	return nil
}

// free returns the healthy devices that no pod holds.
func free(k simkubelet.Snapshot, resource string) []string {
	held := map[string]bool{}
	for _, pod := range k.Pods {
		for _, c := range pod.Containers {
			for _, id := range c.Devices(resource) {
				held[id] = true
			}
		}
	}
	var ids []string
	for _, d := range k.Resources[resource].Devices {
		if d.Healthy && !held[d.ID] {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// ask calls the plugin of a resource.
func (c *call) ask(resource string, question func(context.Context, api.DevicePluginClient) error) error {
	socket := filepath.Join(c.plugins(), c.kubelet.Snapshot().Resources[resource].Socket)
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return question(ctx, api.NewDevicePluginClient(connection))
}
