package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sort"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
)

// diary is what the API server tells of the node and the tests' pods, as it comes.
type diary struct {
	mu sync.Mutex
	// statuses are the node's allocatable each time it is another, truths what the
	// kubelet itself has.
	statuses, truths []status
	lives            map[string]*life
	// serving are Virgate's pods that are ready, overlaps how often one became so
	// beside another.
	serving  map[string]bool
	overlaps int
	// wrong is what no pod and no watch may do.
	wrong []string
}

type status struct {
	at          time.Time
	allocatable map[string]int64
}

// keepDiary begins one that ends with the test.
func (c *cluster) keepDiary(t *testing.T) *diary {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := &diary{lives: map[string]*life{}, serving: map[string]bool{}}
	nodes, err := c.client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", hostName).String()})
	if err != nil {
		t.Fatal(err)
	}
	pods, err := c.client.CoreV1().Pods(workspace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	plugins, err := c.client.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=virgate"})
	if err != nil {
		t.Fatal(err)
	}
	var following sync.WaitGroup
	for _, events := range []watch.Interface{nodes, pods, plugins} {
		following.Go(func() { d.follow(ctx, events) })
	}
	t.Cleanup(func() { cancel(); following.Wait() })
	return d
}

func (d *diary) follow(ctx context.Context, events watch.Interface) {
	for event := range events.ResultChan() {
		d.mu.Lock()
		switch object := event.Object.(type) {
		case *v1.Node:
			d.takeNode(object)
		case *v1.Pod:
			if object.Namespace == namespace {
				d.takePlugin(object, event.Type == watch.Deleted)
			} else {
				d.takePod(object, event.Type == watch.Deleted)
			}
		default:
			d.wrong = append(d.wrong, fmt.Sprintf("watch: %v", object))
		}
		d.mu.Unlock()
	}
	if ctx.Err() == nil {
		d.complain("a watch ended")
	}
}

func (d *diary) complain(format string, arguments ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wrong = append(d.wrong, fmt.Sprintf(format, arguments...))
}

func (d *diary) takeNode(node *v1.Node) {
	d.statuses = appendStatus(d.statuses, offered(node.Status.Allocatable))
}

func (d *diary) takeTruth(devices map[string][]holding) {
	now := map[string]int64{}
	for resource, each := range devices {
		now[resource] = int64(len(each))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.truths = appendStatus(d.truths, now)
}

// appendStatus adds it if it is new.
func appendStatus(all []status, now map[string]int64) []status {
	if len(all) > 0 && maps.Equal(now, all[len(all)-1].allocatable) {
		return all
	}
	return append(all, status{time.Now(), now})
}

// lastBefore is the one that held at that time.
func lastBefore(all []status, when time.Time) status {
	i := sort.Search(len(all), func(i int) bool { return all[i].at.After(when) })
	if i == 0 {
		return status{}
	}
	return all[i-1]
}

func (d *diary) takePlugin(pod *v1.Pod, deleted bool) {
	if deleted || !slices.ContainsFunc(pod.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.PodReady && c.Status == v1.ConditionTrue
	}) {
		delete(d.serving, pod.Name)
		return
	}
	if !d.serving[pod.Name] && len(d.serving) > 0 {
		d.overlaps++
	}
	d.serving[pod.Name] = true
}

// onOffer are the resources of which the node's status has any, sorted.
func (d *diary) onOffer() (names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.statuses) == 0 {
		return nil
	}
	for name, count := range d.statuses[len(d.statuses)-1].allocatable {
		if count > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
