package dradriver

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/kube"
)

// Publish sets what the node offers from now on: all slices of its pool, at least one, as dra.Build
// makes them. Their generations are ignored. Publish does not wait, and the slices must not be
// changed afterwards. Slices that are already published are not written again.
func (d *Driver) Publish(offered []resourceapi.ResourceSlice) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if equality.Semantic.DeepEqual(d.given, offered) {
		return
	}
	d.urgent = d.urgent || newTaint(d.given, offered)
	d.given, d.status.written = offered, time.Time{}
	d.wake.Notify()
}

// newTaint reports whether a device has a taint that it did not have before.
func newTaint(before, now []resourceapi.ResourceSlice) bool {
	taints := map[string][]resourceapi.DeviceTaint{}
	for _, slice := range before {
		for _, device := range slice.Spec.Devices {
			taints[device.Name] = device.Taints
		}
	}
	return slices.ContainsFunc(now, func(slice resourceapi.ResourceSlice) bool {
		return slices.ContainsFunc(slice.Spec.Devices, func(device resourceapi.Device) bool {
			return len(device.Taints) > 0 && !equality.Semantic.DeepEqual(device.Taints, taints[device.Name])
		})
	})
}

// publish keeps the last published slices in the API server until ctx ends. It checks them when
// something is published and when another program changes them. The kubelet deletes them when it
// starts, perhaps after the registration, and the garbage collector deletes them when the Node is
// created anew (kubernetes 1.36.3, wipeResourceSlices in pkg/kubelet/cm/dra/plugin).
func (d *Driver) publish(ctx context.Context) {
	p := publisher{
		Driver:  d,
		known:   map[string]string{},
		unwatch: func() {},
	}
	defer func() { p.unwatch() }()
	retry := d.timing.retry
	var last time.Time
	// due is the time of the next check; zero to wait for an event.
	var due time.Time
	earliest := func(at time.Time) {
		if due.IsZero() || at.Before(due) {
			due = at
		}
	}
	for {
		var look <-chan time.Time
		if !due.IsZero() {
			look = time.After(time.Until(due))
		}
		select {
		case <-ctx.Done():
			return
		case <-d.wake:
			d.mutex.Lock()
			urgent := d.urgent
			d.urgent = false
			d.mutex.Unlock()
			if urgent {
				last = time.Time{}
			}
			earliest(last.Add(d.timing.pace))
		case event, open := <-p.watching:
			switch {
			case !open || event.Type == watch.Error:
				p.unwatch()
				earliest(time.Now().Add(random(d.timing.spread)))
			case !p.knows(event):
				earliest(later(last.Add(d.timing.pace), time.Now().Add(random(d.timing.settle))))
			}
		case <-look:
			due, last = time.Time{}, time.Now()
			err := p.look(ctx)
			if ctx.Err() != nil {
				return
			}
			d.change(func(s *driverStatus) {
				s.unpublished = text(err)
				if err != nil {
					s.failures++
				} else {
					s.slices = len(p.wanted)
					if s.written.IsZero() && equality.Semantic.DeepEqual(p.given, d.given) {
						s.written = time.Now()
					}
				}
			})
			if err != nil {
				due = time.Now().Add(kube.Pause(&retry, err))
			} else {
				retry = d.timing.retry
			}
		}
	}
}

func random(most time.Duration) time.Duration { return time.Duration(rand.Float64() * float64(most)) }

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// publisher is the state of publish. Only one goroutine uses it.
type publisher struct {
	*Driver
	// given is the source of wanted. wanted differs where the API server drops fields, so that the
	// driver does not write the same again and again.
	given, wanted []resourceapi.ResourceSlice
	// known are the versions of the API server's slices, by name. watching reports other versions.
	known    map[string]string
	watching <-chan watch.Event
	unwatch  func()
}

// knows reports whether the event has only known versions, such as the driver's own writes.
func (p *publisher) knows(event watch.Event) bool {
	object, err := meta.Accessor(event.Object)
	if err != nil {
		return true
	}
	version, there := p.known[object.GetName()]
	if event.Type == watch.Deleted {
		return !there
	}
	return there && version == object.GetResourceVersion()
}

// look compares the slices once, and writes those that differ.
func (p *publisher) look(ctx context.Context) error {
	p.mutex.Lock()
	given := p.Driver.given
	p.mutex.Unlock()
	if len(given) == 0 {
		return nil
	}
	if !equality.Semantic.DeepEqual(given, p.given) {
		p.given, p.wanted = given, slices.Clone(given)
	}
	asking, cancel := context.WithTimeout(ctx, p.timing.request)
	defer cancel()
	ours := kube.Query{
		What:     "ResourceSlices",
		Path:     resourceAPI,
		Resource: resourceSlices,
		Selector: fields.AndSelectors(
			fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, p.options.Driver),
			fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, p.options.Node),
		),
	}
	var list resourceapi.ResourceSliceList
	if err := p.api.List(asking, ours, &list); err != nil {
		return err
	}
	clear(p.known)
	for _, slice := range list.Items {
		p.known[slice.Name] = slice.ResourceVersion
	}
	todo, err := difference(list.Items, p.wanted)
	if err != nil {
		return err
	}
	if err := p.write(asking, todo); err != nil {
		return err
	}
	if p.watching != nil {
		return nil
	}
	events, err := p.api.Watch(ctx, ours, list.ResourceVersion)
	if err != nil {
		return err
	}
	p.watching, p.unwatch = events.ResultChan(), func() {
		events.Stop()
		p.watching, p.unwatch = nil, func() {}
	}
	return nil
}

// writes are the changes that make the slices as wanted, in this order: nothing is allocated from a
// pool with a missing slice, and obsolete devices must go first.
type writes struct {
	remove, update, create []resourceapi.ResourceSlice
}

// difference compares the existing slices with the wanted ones. If only one slice changes, the
// pool's generation stays, because that is a single write and the pool is complete at all times.
// Otherwise all slices get a new generation. It is an error if there are slices of another program.
func difference(existing, wanted []resourceapi.ResourceSlice) (writes, error) {
	var w writes
	var generation int64
	for _, slice := range existing {
		generation = max(generation, slice.Spec.Pool.Generation)
	}
	byName := map[string]resourceapi.ResourceSlice{}
	for _, slice := range existing {
		named := slices.ContainsFunc(wanted,
			func(want resourceapi.ResourceSlice) bool { return want.Name == slice.Name })
		switch {
		case slice.Spec.Pool.Name != wanted[0].Spec.Pool.Name:
			return writes{},
				fmt.Errorf("another program publishes this driver's devices on this node: ResourceSlice %s, pool %s",
					slice.Name, slice.Spec.Pool.Name)
		case !named:
			w.remove = append(w.remove, slice)
		default:
			byName[slice.Name] = slice
		}
	}
	var changed []resourceapi.ResourceSlice
	for _, want := range wanted {
		want.Spec.Pool.Generation = generation
		old, there := byName[want.Name]
		if !there {
			w.create = append(w.create, want)
			continue
		}
		update := old
		update.Spec = keepTimes(want.Spec, old.Spec)
		w.update = append(w.update, update)
		if !equality.Semantic.DeepEqual(update.Spec, old.Spec) {
			changed = append(changed, update)
		}
	}
	if w.create == nil && len(changed) <= 1 {
		w.update = changed
		return w, nil
	}
	for _, all := range [][]resourceapi.ResourceSlice{w.update, w.create} {
		for i := range all {
			all[i].Spec.Pool.Generation = generation + 1
		}
	}
	return w, nil
}

// keepTimes gives each taint without a time the time of the same taint in old, because the API
// server sets it.
func keepTimes(spec, old resourceapi.ResourceSliceSpec) resourceapi.ResourceSliceSpec {
	spec = *spec.DeepCopy()
	since := map[string]*metav1.Time{}
	key := func(device string, t resourceapi.DeviceTaint) string {
		return device + " " + t.Key + " " + t.Value + " " + string(t.Effect)
	}
	for _, device := range old.Devices {
		for _, taint := range device.Taints {
			since[key(device.Name, taint)] = taint.TimeAdded
		}
	}
	for _, device := range spec.Devices {
		for i, taint := range device.Taints {
			if taint.TimeAdded == nil {
				device.Taints[i].TimeAdded = since[key(device.Name, taint)]
			}
		}
	}
	return spec
}

func (p *publisher) write(ctx context.Context, todo writes) error {
	for _, slice := range todo.remove {
		only := metav1.Preconditions{UID: &slice.UID, ResourceVersion: &slice.ResourceVersion}
		err := p.api.Remove(ctx, only, resourceAPI, resourceSlices, slice.Name)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete ResourceSlice %s: %w", slice.Name, err)
		}
		delete(p.known, slice.Name)
		p.change(func(s *driverStatus) { s.writes++ })
	}
	for _, slice := range todo.update {
		if err := p.send(ctx, p.api.Put().Name(slice.Name), slice); err != nil {
			return fmt.Errorf("update ResourceSlice %s: %w", slice.Name, err)
		}
	}
	if len(todo.create) == 0 {
		return nil
	}
	// The Node may have been created anew since. A slice whose Node object is gone is deleted too.
	var node metav1.PartialObjectMetadata
	err := p.api.Insist(ctx, kube.MetadataOnly(p.api.Get().Resource("nodes").Name(p.options.Node))).Into(&node)
	if err != nil {
		return fmt.Errorf("read node %s: %w", p.options.Node, err)
	}
	for _, slice := range todo.create {
		slice.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: "v1",
			Kind:       "Node",
			Name:       p.options.Node,
			UID:        node.UID,
			Controller: new(true),
		}}
		if err := p.send(ctx, p.api.Post(), slice); err != nil {
			return fmt.Errorf("create ResourceSlice %s: %w", slice.Name, err)
		}
	}
	return nil
}

const (
	resourceAPI                    = "/apis/resource.k8s.io/v1"
	resourceSlices, resourceClaims = "resourceslices", "resourceclaims"
)

// send writes a slice, and checks what the API server stored. If features are turned off, the API
// server drops fields, and would drop them again, so the stored slice becomes the wanted one.
func (p *publisher) send(ctx context.Context, request *rest.Request, slice resourceapi.ResourceSlice) error {
	var stored resourceapi.ResourceSlice
	request.AbsPath(resourceAPI).Resource(resourceSlices).Param("fieldManager", kube.FieldManager).Body(&slice)
	if err := p.api.Insist(ctx, request).Into(&stored); err != nil {
		return err
	}
	p.known[slice.Name] = stored.ResourceVersion
	var missing dra.Features
	if want := keepTimes(slice.Spec, stored.Spec); !equality.Semantic.DeepEqual(want, stored.Spec) {
		i := slices.IndexFunc(p.wanted,
			func(wanted resourceapi.ResourceSlice) bool { return wanted.Name == slice.Name })
		p.wanted[i].Spec = *stored.Spec.DeepCopy()
		missing = dropped(want, stored.Spec)
	}
	p.change(func(s *driverStatus) {
		s.writes++
		s.without.Taints = s.without.Taints || missing.Taints
		s.without.Counters = s.without.Counters || missing.Counters
		s.without.Shares = s.without.Shares || missing.Shares
		s.without.Other = s.without.Other || missing.Other
	})
	return nil
}

// dropped returns the features whose fields are missing in stored, if something is missing.
func dropped(sent, stored resourceapi.ResourceSliceSpec) dra.Features {
	f := dra.Features{Counters: len(stored.SharedCounters) < len(sent.SharedCounters)}
	for i := range min(len(sent.Devices), len(stored.Devices)) {
		a, b := sent.Devices[i], stored.Devices[i]
		f.Taints = f.Taints || len(b.Taints) < len(a.Taints)
		f.Counters = f.Counters || len(b.ConsumesCounters) < len(a.ConsumesCounters)
		f.Shares = f.Shares || a.AllowMultipleAllocations != nil && b.AllowMultipleAllocations == nil
	}
	f.Other = f == dra.Features{}
	return f
}
