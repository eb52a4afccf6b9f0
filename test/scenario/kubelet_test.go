package scenario

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

func (c *call) kubeletDoes() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	what, argument := c.take(), c.take()
	if what == "start" {
		if c.kubelet == nil {
			c.kubelet = simkubelet.New(simkubelet.Options{
				Dir: c.plugins(), PodResourcesSocket: c.podResources(), NUMAAligned: argument == "aligned",
			})
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
		c.kubelet.SetSilent(what == "silent")
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

// wipe removes the program's sockets, of which there must be some.
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

// fraction reads "28/32".
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
	limit, err := c.within()
	if err != nil {
		return err
	}
	began := time.Now()
	if err := c.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[resource]
		return r.Allocatable == allocatable && r.Capacity == capacity
	}); err != nil {
		return err
	}
	return c.judge(began, limit)
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

// unitID is the UUID of the GPU (0) or partition (0:1) at the index.
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

// streams waits until the counters have come to what is wanted, for the
// kubelet counts an end a moment later, and refuses any that has gone beyond.
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
