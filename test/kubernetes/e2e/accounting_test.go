package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// eventLog records what the API server reports about the node and the tests' pods, as it arrives.
type eventLog struct {
	mu sync.Mutex
	// statuses holds the node's allocatable each time it changes, kubeletStates the kubelet's own numbers.
	statuses, kubeletStates []status
	pods                    map[string]*podRecord
	// serving holds Virgate's ready pods. overlaps counts how often a pod became ready beside another one,
	// lapses how often a pod that was to stay became not ready.
	serving          map[string]bool
	overlaps, lapses int
	// images maps the names of Virgate's pods to their images.
	images map[string]string
	// rollingOut is true while Virgate's pod is being replaced.
	rollingOut bool
	// stopped counts the Node's changes with GPUSharingReady's reason Stopped.
	stopped int
	// wrong lists violations by pods and watches.
	wrong []string
}

type status struct {
	at          time.Time
	allocatable map[string]int64
}

// watchCluster starts an eventLog that ends with the test.
func (c *cluster) watchCluster(t *testing.T) *eventLog {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := &eventLog{pods: map[string]*podRecord{}, serving: map[string]bool{}, images: map[string]string{}}
	core := c.client.CoreV1().RESTClient()
	var following sync.WaitGroup
	for _, of := range []struct {
		resource, namespace, label string
		field                      fields.Selector
	}{
		{"nodes", "", "", fields.OneTermEqualSelector("metadata.name", hostName)},
		{"pods", workspace, "", fields.Everything()},
		{"pods", namespace, pluginSelector, fields.Everything()},
	} {
		objects := cache.NewFilteredListWatchFromClient(core, of.resource, of.namespace, func(options *metav1.ListOptions) {
			options.LabelSelector, options.FieldSelector = of.label, of.field.String()
		})
		now, err := objects.ListWithContext(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := meta.EachListItem(now, func(object runtime.Object) error { d.add(watch.Event{Type: watch.Added, Object: object}); return nil }); err != nil {
			t.Fatal(err)
		}
		version, err := meta.NewAccessor().ResourceVersion(now)
		if err != nil {
			t.Fatal(err)
		}
		// The API server ends the watch of a client that does not keep up; this one resumes where it was.
		events, err := toolswatch.NewRetryWatcherWithContext(ctx, version, objects)
		if err != nil {
			t.Fatal(err)
		}
		following.Go(func() { d.follow(ctx, events) })
	}
	t.Cleanup(func() { cancel(); following.Wait() })
	return d
}

func (d *eventLog) follow(ctx context.Context, events watch.Interface) {
	for event := range events.ResultChan() {
		d.add(event)
	}
	if ctx.Err() == nil {
		d.complain("a watch ended")
	}
}

func (d *eventLog) add(event watch.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch object := event.Object.(type) {
	case *v1.Node:
		d.addNode(object)
	case *v1.Pod:
		if object.Namespace == namespace {
			d.addPluginPod(object, event.Type == watch.Deleted)
		} else {
			d.addPod(object, event.Type == watch.Deleted)
		}
	default:
		d.wrong = append(d.wrong, fmt.Sprintf("watch: %v", object))
	}
}

func (d *eventLog) complain(format string, arguments ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wrong = append(d.wrong, fmt.Sprintf(format, arguments...))
}

func (d *eventLog) addNode(node *v1.Node) {
	d.statuses = appendStatus(d.statuses, offered(node.Status.Allocatable))
	if slices.ContainsFunc(node.Status.Conditions, func(c v1.NodeCondition) bool { return c.Type == "GPUSharingReady" && c.Reason == "Stopped" }) {
		d.stopped++
	}
}

func (d *eventLog) addKubeletState(devices map[string][]heldDevice) {
	now := map[string]int64{}
	for resource, each := range devices {
		now[resource] = int64(len(each))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kubeletStates = appendStatus(d.kubeletStates, now)
}

// appendStatus appends the status if it differs from the last one.
func appendStatus(all []status, now map[string]int64) []status {
	if len(all) > 0 && maps.Equal(now, all[len(all)-1].allocatable) {
		return all
	}
	return append(all, status{time.Now(), now})
}

func (d *eventLog) addPluginPod(pod *v1.Pod, deleted bool) {
	d.images[pod.Name] = pod.Spec.Containers[0].Image
	if deleted {
		delete(d.images, pod.Name)
	}
	if deleted || !slices.ContainsFunc(pod.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.PodReady && c.Status == v1.ConditionTrue
	}) {
		if d.serving[pod.Name] && !deleted && pod.DeletionTimestamp == nil {
			d.lapses++
		}
		delete(d.serving, pod.Name)
		return
	}
	if !d.serving[pod.Name] && len(d.serving) > 0 {
		d.overlaps++
	}
	d.serving[pod.Name] = true
}

// only returns an error that lists Virgate's pods, unless there is exactly one and it has that image.
func (d *eventLog) only(image string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if images := slices.Collect(maps.Values(d.images)); !slices.Equal(images, []string{image}) {
		return fmt.Errorf("there are %q", images)
	}
	return nil
}

// onOffer returns the resources that the node's status has devices of, sorted.
func (d *eventLog) onOffer() (names []string) {
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

// podRecord is what the test has seen of a pod. A time is zero until the test has heard of the event, which
// may be long after it happened. Only bound is never late: it is at most a second before the pod was bound.
// The kubelet looked at the pod between bound and refused.
type podRecord struct {
	resource          string
	bound, ran, ended time.Time
	refused           time.Time
	refusal           string
	beingDeleted      bool
}

func (d *eventLog) addPod(pod *v1.Pod, deleted bool) {
	l := d.pods[pod.Name]
	if l == nil {
		l = &podRecord{}
		d.pods[pod.Name] = l
	}
	for name := range pod.Spec.Containers[0].Resources.Limits {
		l.resource = string(name)
	}
	now := time.Now()
	l.beingDeleted = l.beingDeleted || pod.DeletionTimestamp != nil
	for _, condition := range pod.Status.Conditions {
		if condition.Type == v1.PodScheduled && condition.Status == v1.ConditionTrue {
			keepFirst(&l.bound, condition.LastTransitionTime.Time)
		}
	}
	switch pod.Status.Phase {
	case v1.PodRunning:
		keepFirst(&l.ran, now)
	case v1.PodFailed, v1.PodSucceeded:
		keepFirst(&l.ended, now)
		if l.ran.IsZero() && !l.beingDeleted && (overtaken(pod) || d.rollingOut && cutOff(pod)) {
			keepFirst(&l.refused, now)
			l.refusal = pod.Status.Reason + ": " + pod.Status.Message
		} else if !l.beingDeleted && l.refused.IsZero() {
			d.wrong = append(d.wrong, fmt.Sprintf("pod %s is %s: %s: %s", pod.Name, pod.Status.Phase, pod.Status.Reason, pod.Status.Message))
		}
	}
	for _, container := range pod.Status.ContainerStatuses {
		if container.RestartCount > 0 {
			d.wrong = append(d.wrong, fmt.Sprintf("pod %s was restarted", pod.Name))
		}
		if waiting := container.State.Waiting; waiting != nil && waiting.Reason != "ContainerCreating" && !l.beingDeleted {
			d.wrong = append(d.wrong, fmt.Sprintf("pod %s: %s: %s", pod.Name, waiting.Reason, waiting.Message))
		}
	}
	if deleted {
		keepFirst(&l.ended, now)
	}
}

// overtaken reports whether the kubelet had no device left for the pod, or had chosen one before it heard
// that the device is offered in another mode.
func overtaken(pod *v1.Pod) bool {
	if pod.Status.Reason != unexpectedAdmission {
		return strings.HasPrefix(pod.Status.Reason, outOf)
	}
	return strings.Contains(pod.Status.Message, "requested number of devices unavailable") ||
		strings.Contains(pod.Status.Message, "no healthy devices present") ||
		strings.Contains(pod.Status.Message, "is no longer offered: the profile has changed")
}

// cutOff reports whether the kubelet called a plugin that had ended in a rollout. Canceled is the kubelet's
// own answer while it closes the connection.
func cutOff(pod *v1.Pod) bool {
	return pod.Status.Reason == unexpectedAdmission && (strings.Contains(pod.Status.Message, "code = Unavailable") ||
		strings.Contains(pod.Status.Message, "code = Canceled") || strings.Contains(pod.Status.Message, "has been stopped"))
}

func keepFirst(moment *time.Time, now time.Time) {
	if moment.IsZero() {
		*moment = now
	}
}

// deleting is called before a pod is deleted, so that the event cannot come first.
func (d *eventLog) deleting(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pods[name] == nil {
		d.pods[name] = &podRecord{}
	}
	d.pods[name].beingDeleted = true
}

// runs reports whether the pod runs and is not being deleted.
func (d *eventLog) runs(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.pods[name]
	return l != nil && l.runs()
}

func (l *podRecord) runs() bool { return !l.ran.IsZero() && l.ended.IsZero() && !l.beingDeleted }

// decided reports whether the pod has run or ended.
func (d *eventLog) decided(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.pods[name]
	return l != nil && (!l.ran.IsZero() || !l.ended.IsZero())
}

// isRefused reports whether the kubelet refused the pod.
func (d *eventLog) isRefused(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.pods[name]
	return l != nil && !l.refused.IsZero()
}

// allRan returns an error that lists the pods which have neither run nor ended nor been deleted.
func (d *eventLog) allRan() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, l := range d.pods {
		if l.ran.IsZero() && l.ended.IsZero() && !l.beingDeleted {
			return fmt.Errorf("pod %s does not: %+v", name, *l)
		}
	}
	return nil
}

// running counts the pods that run.
func (d *eventLog) running() (count int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, l := range d.pods {
		if l.runs() {
			count++
		}
	}
	return count
}

// heldDevice is a pod's device as the kubelet reports it.
type heldDevice struct {
	sharingMode
	unit, id string
}

// kubeletSays returns a client of the kubelet's PodResources API, which reports devices and their holders
// without the API server.
func (c *cluster) kubeletSays(t *testing.T) api.PodResourcesListerClient {
	t.Helper()
	// The kubelet may be away for a while: gRPC's own pauses grow to minutes.
	again := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Second / 4, Multiplier: 1, MaxDelay: time.Second / 4}, MinConnectTimeout: time.Second}
	connection, err := grpc.NewClient("unix:///var/lib/kubelet/pod-resources/kubelet.sock",
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(again))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return api.NewPodResourcesListerClient(connection)
}

// holdings returns the devices of the tests' pods, by pod name.
func holdings(ctx context.Context, kubelet api.PodResourcesListerClient) (map[string][]heldDevice, error) {
	answer, err := kubelet.List(ctx, &api.ListPodResourcesRequest{})
	if err != nil {
		return nil, err
	}
	found := map[string][]heldDevice{}
	for _, pod := range answer.PodResources {
		if pod.Namespace != workspace {
			continue
		}
		for _, container := range pod.Containers {
			for _, devices := range container.Devices {
				found[pod.Name] = append(found[pod.Name], holdingsOf(devices)...)
			}
		}
	}
	return found, nil
}

func holdingsOf(devices *api.ContainerDevices) []heldDevice {
	var found []heldDevice
	for _, id := range devices.DeviceIds {
		unit, _, shared := strings.Cut(id, "::")
		found = append(found, heldDevice{sharingMode{devices.ResourceName, shared}, unit, id})
	}
	return found
}

// healthy returns the devices of NVIDIA's resources that the kubelet could grant or has granted, by
// resource.
func healthy(ctx context.Context, kubelet api.PodResourcesListerClient) (map[string][]heldDevice, error) {
	answer, err := kubelet.GetAllocatableResources(ctx, &api.AllocatableResourcesRequest{})
	if err != nil {
		return nil, err
	}
	found := map[string][]heldDevice{}
	for _, devices := range answer.Devices {
		found[devices.ResourceName] = append(found[devices.ResourceName], holdingsOf(devices)...)
	}
	return found, nil
}

// units returns the units on which the resource is offered, sorted.
func units(t *testing.T, kubelet api.PodResourcesListerClient, resource string) []string {
	t.Helper()
	devices, err := healthy(t.Context(), kubelet)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]struct{}{}
	for _, device := range devices[resource] {
		found[device.unit] = struct{}{}
	}
	return slices.Sorted(maps.Keys(found))
}

// shareMonitor tracks which pod holds which device, as the kubelet reports it. It adds to the event log when
// a pod loses a device, or shares a GPU that it should have alone.
type shareMonitor struct {
	kubelet api.PodResourcesListerClient
	events  *eventLog
	// units are the node's GPUs in the order of the layouts.
	units []string

	mu     sync.Mutex
	looks  []look
	wanted layout
	// failed is the error of the newest look; nil if it succeeded.
	failed error
	// rests counts the storm's rests.
	rests int
	// doubled are the pods that the previous look found together on a GPU meant for one pod.
	doubled map[string][]string
	// grown marks devices that have a GPU's own ID and were seen to be shares, by pod and device.
	grown map[[2]string]bool
	// givenTwice counts the looks in which two pods had the same device; see alone.
	givenTwice atomic.Int64
	// strange maps each complaint about held devices to its beginning; slowest is the longest duration of
	// any.
	strange map[string]oddity
	slowest atomic.Int64
}

// look is what the kubelet reported at one time: the holders by pod, and the healthy devices by resource.
type look struct {
	at            time.Time
	held, healthy map[string][]heldDevice
}

// oddity says when a deviation began, and the number of rests before that.
type oddity struct {
	at    time.Time
	rests int
	told  bool
}

// startShareMonitor starts a monitor that runs until the end of the test.
func startShareMonitor(t *testing.T, kubelet api.PodResourcesListerClient, d *eventLog, units []string, wanted layout) *shareMonitor {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &shareMonitor{kubelet: kubelet, events: d, units: units, wanted: wanted, strange: map[string]oddity{}, grown: map[[2]string]bool{}}
	var following sync.WaitGroup
	following.Go(func() { f.run(ctx) })
	t.Cleanup(func() { cancel(); following.Wait() })
	return f
}

func (f *shareMonitor) run(ctx context.Context) {
	tick := time.NewTicker(500 * time.Millisecond) // Each look may set off the bug of alone.
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		held, err := holdings(ctx, f.kubelet)
		var devices map[string][]heldDevice
		if err == nil {
			devices, err = healthy(ctx, f.kubelet)
		}
		f.mu.Lock()
		f.failed = err
		f.mu.Unlock()
		if err != nil { // The kubelet refuses clients that ask too often.
			continue
		}
		f.seeGrown(held, devices)
		f.compare(ctx, held)
		f.alone(ctx, held)
		f.events.addKubeletState(devices)
		f.mu.Lock()
		f.looks = append(f.looks, look{time.Now(), held, devices})
		f.mu.Unlock()
		f.persists(ctx)
	}
}

func (f *shareMonitor) complain(ctx context.Context, format string, arguments ...any) {
	if ctx.Err() == nil {
		f.events.complain(format, arguments...)
	}
}

// seeGrown finds the shares that have a GPU's own ID: other shares of the GPU are healthy under the same
// name. They stay marked until their pod has gone. When the GPU is exclusive again, an unmarked one is a
// share if it is unhealthy: a whole GPU would be healthy.
func (f *shareMonitor) seeGrown(held, healthy map[string][]heldDevice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	isHealthy, shares := map[[2]string]bool{}, map[[2]string]bool{}
	for _, devices := range healthy {
		for _, d := range devices {
			isHealthy[[2]string{d.resource, d.id}] = true
			shares[[2]string{d.resource, d.unit}] = shares[[2]string{d.resource, d.unit}] || d.shared
		}
	}
	for _, devices := range healthy {
		for i, d := range devices {
			devices[i].shared = d.shared || shares[[2]string{d.resource, d.unit}]
		}
	}
	for pod, devices := range held {
		for i, d := range devices {
			of, who := [2]string{d.resource, d.id}, [2]string{pod, d.resource + " " + d.id}
			leaves := !isHealthy[of] && f.wanted[d.sharingMode][slices.Index(f.units, d.unit)] > 0
			f.grown[who] = f.grown[who] || shares[of]
			devices[i].shared = d.shared || f.grown[who] || leaves
		}
	}
}

// compare checks that each pod that ran and is not being deleted holds what it held.
func (f *shareMonitor) compare(ctx context.Context, held map[string][]heldDevice) {
	for name, before := range f.last().held {
		if difference := cmp.Diff(ids(before), ids(held[name])); difference != "" && f.events.runs(name) {
			f.complain(ctx, "pod %s has other devices (-before +after):\n%s", name, difference)
		}
	}
}

func ids(devices []heldDevice) (all []string) {
	for _, d := range devices {
		all = append(all, d.resource+" "+d.id)
	}
	return all
}

// alone checks that a whole GPU has only one tenant, apart from tenants of its shares. Two looks must agree:
// the kubelet reads the pods one after another, and a pod may pass a GPU to the next one meanwhile.
//
// Two pods with the same device ID are only counted, because that is a bug of the kubelet (1.36): each List
// of pod resources calls ManagerImpl.UpdateAllocatedDevices. If a pod has just ended, that call also forgets
// the device which the kubelet is giving to another pod, and the kubelet gives the device to the next pod
// too.
func (f *shareMonitor) alone(ctx context.Context, held map[string][]heldDevice) {
	whole, pods, ids := map[string]bool{}, map[string][]string{}, map[string][]string{}
	for name, devices := range held {
		for _, device := range devices {
			whole[device.unit] = whole[device.unit] || device.id == device.unit
			pods[device.unit] = append(pods[device.unit], name)
			ids[device.unit] = append(ids[device.unit], device.resource+" "+device.id)
		}
	}
	doubled := map[string][]string{}
	for unit, isWhole := range whole {
		if !isWhole {
			continue
		}
		slices.Sort(pods[unit])
		slices.Sort(ids[unit])
		resource, _, _ := strings.Cut(ids[unit][0], " ")
		oneName := !slices.ContainsFunc(ids[unit], func(id string) bool { return !strings.HasPrefix(id, resource+" ") })
		twice := len(slices.DeleteFunc(slices.Clone(ids[unit]), func(id string) bool { return id != resource+" "+unit })) > 1
		// Shares of one name; one of them has the GPU's own ID.
		if len(pods[unit]) < 2 || oneName && !twice {
			continue
		}
		doubled[unit] = pods[unit]
		switch {
		case !slices.Equal(f.doubled[unit], pods[unit]):
		case oneName: // The device with the GPU's own ID, whether whole or a share.
			f.givenTwice.Add(1)
		default:
			f.complain(ctx, "%s is whole one's of the pods %q, which have %q", unit, pods[unit], ids[unit])
		}
	}
	f.doubled = doubled
}

// givenToTwo returns one pod of each pair that has the same device; see alone.
func (f *shareMonitor) givenToTwo() (names []string) {
	holders := map[heldDevice]bool{}
	now := f.last()
	for _, name := range slices.Sorted(maps.Keys(now.held)) {
		for _, device := range now.held[name] {
			if holders[device] {
				names = append(names, name)
			}
			holders[device] = true
		}
	}
	return names
}

// want is called before the node should offer something else.
func (f *shareMonitor) want(l layout) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wanted = l
}

// rest is called once the node offers what it should.
func (f *shareMonitor) rest() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rests++
}

// looked counts the looks so far.
func (f *shareMonitor) looked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.looks)
}

// lookedSince returns an error unless a whole look happened after the first before looks.
func (f *shareMonitor) lookedSince(before int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.looks) < before+2 { // The first of them may have begun earlier.
		return fmt.Errorf("the kubelet has not said again who holds what: %w", f.failed)
	}
	return nil
}

// unlike lists the running pods whose devices differ from the layout. A held device is healthy exactly
// while its GPU is to be offered in that mode, even in fewer shares. In a mode that ends it is Unhealthy,
// so that no other pod gets it.
func (f *shareMonitor) unlike() (complaints []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.looks) == 0 {
		return []string{"nobody has looked"}
	}
	now := f.looks[len(f.looks)-1]
	for _, name := range slices.Sorted(maps.Keys(now.held)) {
		for _, device := range now.held[name] {
			at := slices.Index(f.units, device.unit)
			stays := f.wanted[device.sharingMode][at] > 0 || !device.shared && f.wanted[sharingMode{device.resource, true}][at] > 0
			if stays != slices.Contains(now.healthy[device.resource], device) && f.events.runs(name) {
				complaints = append(complaints, fmt.Sprintf("pod %s holds %s of %s: healthy is %t, and its GPU stays in that mode is %t",
					name, device.id, device.resource, !stays, stays))
			}
		}
	}
	return complaints
}

// odd lists the holders that a layout does not explain: pods that do not run, or whose device is unhealthy
// or held by another pod too.
func (f *shareMonitor) odd() (found []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	holders := map[heldDevice]string{}
	now := f.looks[len(f.looks)-1]
	found = append(found, "looked at "+now.at.Format(clock))
	for _, name := range slices.Sorted(maps.Keys(now.held)) {
		for _, device := range now.held[name] {
			isHealthy := slices.Contains(now.healthy[device.resource], device)
			if other := holders[device]; other != "" || !isHealthy || !f.events.runs(name) {
				found = append(found, fmt.Sprintf("%s: %s, healthy %t, runs %t, another's %q", name, device.id, isHealthy, f.events.runs(name), other))
			}
			holders[device] = name
		}
	}
	return found
}

// persists reports a deviation from the layout that has lasted since the last rest but one.
func (f *shareMonitor) persists(ctx context.Context) {
	now := time.Now()
	strange := map[string]oddity{}
	complaints := f.unlike()
	f.mu.Lock()
	rests := f.rests
	f.mu.Unlock()
	for _, complaint := range complaints {
		first, known := f.strange[complaint]
		if !known {
			first = oddity{at: now, rests: rests}
		}
		if rests >= first.rests+2 && !first.told {
			f.complain(ctx, "since %s: %s", first.at.Format(clock), complaint)
			first.told = true
		}
		f.slowest.Store(max(f.slowest.Load(), int64(now.Sub(first.at))))
		strange[complaint] = first
	}
	f.strange = strange
}

// last returns the newest look.
func (f *shareMonitor) last() look {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.looks) == 0 {
		return look{}
	}
	return f.looks[len(f.looks)-1]
}

// counts returns how many devices of each GPU are held in each mode.
func (f *shareMonitor) counts() map[sharingMode][8]int {
	counts := map[sharingMode][8]int{}
	for _, devices := range f.last().held {
		for _, device := range devices {
			of := counts[device.sharingMode]
			of[slices.Index(f.units, device.unit)]++
			counts[device.sharingMode] = of
		}
	}
	return counts
}

// free counts the GPUs that no pod held in any look of that time, nor in the two looks after it: one of
// these may have begun before, and the kubelet shows a grant a moment later.
func (f *shareMonitor) free(from, to time.Time) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	held, after := map[string]bool{}, 0
	for _, look := range f.looks {
		if look.at.Before(from) {
			continue
		}
		if look.at.After(to) {
			if after++; after > 2 {
				break
			}
		}
		for _, devices := range look.held {
			for _, device := range devices {
				held[device.unit] = true
			}
		}
	}
	return len(f.units) - len(held)
}
