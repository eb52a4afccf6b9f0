package configsource

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/sharing"
)

var errNotThere = errors.New("not there")

// Client follows objects of the API server. A *kube.Client is one.
type Client interface {
	Follow(context.Context, kube.Query, kube.Store)
}

// watched is the needed part of some objects of the API server, kept up to date.
type watched[T any] struct {
	kube.Query
	store  *partStore[T]
	client Client
}

// newWatched returns a watched; part and equal are as in partStore.
func newWatched[T any](
	client Client,
	q kube.Query,
	part func(object any) (string, T, bool),
	equal func(a, b T) bool,
	log *slog.Logger,
) watched[T] {
	s := &partStore[T]{
		what:  q.What,
		part:  part,
		equal: equal,
		log:   log,
	}
	return watched[T]{q, s, client}
}

// Watch follows the objects until ctx ends. It calls changed, from one goroutine, whenever their
// value or error has changed.
func (w watched[T]) Watch(ctx context.Context, changed func()) error {
	w.store.changed = changed
	w.client.Follow(ctx, w.Query, w.store)
	return nil
}

// object is the needed part of one object of the API server.
type object[T any] struct {
	name string
	watched[T]
}

// newObject returns an object; of extracts the needed part.
func newObject[T any](
	client Client,
	q kube.Query,
	name string,
	of func(object any) (T, bool),
	equal func(a, b T) bool,
	log *slog.Logger,
) object[T] {
	part := func(object any) (string, T, bool) {
		if described, err := meta.Accessor(object); err != nil || described.GetName() != name {
			var none T
			return name, none, false
		}
		value, ok := of(object)
		return name, value, ok
	}
	return object[T]{name, newWatched(client, q, part, equal, log)}
}

// String returns the displayed name: "ConfigMap gpu/profiles".
func (o object[T]) String() string { return o.What }

// value returns the part as last seen, even while the API server cannot be reached. The error is
// that the object does not exist, or configs.ErrPending before the first read.
func (o object[T]) value() (T, error) {
	seen := o.store.load()
	value, there := seen.parts[o.name]
	switch {
	case there:
		return value, nil
	case seen.parts != nil:
		return value, fmt.Errorf("%s: %w", o.What, errNotThere)
	}
	return value, o.store.pending()
}

// ConfigMap holds profiles in a ConfigMap, read from the API server.
type ConfigMap struct{ object[configs.Documents] }

// ParseConfigMapName parses NAMESPACE/NAME.
func ParseConfigMapName(s string) (namespace, name string, err error) {
	namespace, name, found := strings.Cut(s, "/")
	if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
		return "", "", fmt.Errorf("expected NAMESPACE/NAME (got %q)", s)
	}
	return namespace, name, nil
}

// NewConfigMap returns a ConfigMap; Watch reads it.
func NewConfigMap(client Client, namespace, name string, log *slog.Logger) *ConfigMap {
	q := kube.Query{
		What:      "ConfigMap " + namespace + "/" + name,
		Resource:  "configmaps",
		Namespace: namespace,
		Selector:  kube.ByName(name),
	}
	return &ConfigMap{newObject(client, q, name, documentsOf, maps.Equal[configs.Documents, configs.Documents], log)}
}

func documentsOf(object any) (configs.Documents, bool) {
	configMap, ok := object.(*corev1.ConfigMap)
	if !ok {
		return nil, false
	}
	documents := configs.Documents{}
	maps.Copy(documents, configMap.Data)
	for key, data := range configMap.BinaryData { // A mounted ConfigMap has them, too.
		documents[key] = string(data)
	}
	return documents, true
}

// Documents implements Source.
func (c *ConfigMap) Documents() (configs.Documents, error) { return c.value() }

// MIGLabel is the Node's label that names a MIG layout, as for NVIDIA's mig-manager (mig-parted
// v0.15, deployments/container).
const MIGLabel = "nvidia.com/mig.config"

// Labels of the GPU Operator's nodes, as of mig-manager v0.15 (mig-parted, pkg/mig/reconfigure).
const (
	// migManagerLabel is "true" if the operator runs mig-manager.
	migManagerLabel = "nvidia.com/gpu.deploy.mig-manager"
	// paused is in the values of the pauseLabels while programs must close their GPUs: for
	// mig-manager, or for the GPU Operator's k8s-driver-manager, which appends it to the user's own
	// value (v0.12, cmd/driver-manager). forUpgrade is what the latter writes.
	paused, forUpgrade = "paused-for-", "paused-for-driver-upgrade"
	// migStateLabel is written by the program that makes the layouts, by Virgate under the name
	// ownManager: see internal/nodestatus.
	migStateLabel, ownManager = "nvidia.com/mig.config.state", "virgate"
)

// clientLabels are the labels by which the GPU Operator runs DCGM and its exporter, which have GPUs
// open but appear in no process list.
var clientLabels = []string{"nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter"}

// pauseLabels are the labels that are paused: of the device plugin; of other programs that have
// GPUs open, from gpu-operator 26.7 on; and of the DRA driver, on nodes with neither.
var pauseLabels = []string{
	"nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.dra-driver",
}

// Pause is a label of the Node by which another program asks for all GPUs to be closed. The zero
// Pause is no pause.
type Pause struct{ Label, Value string }

// pauseIn finds the pause in a Node's labels. A pause for a new driver comes first, because it
// closes most. unknown are labels with unexpected values.
func pauseIn(all map[string]string) (pause Pause, unknown []Pause) {
	for _, label := range pauseLabels {
		switch value := all[label]; {
		case strings.Contains(value, paused):
			if pause == (Pause{}) || !strings.Contains(pause.Value, forUpgrade) && strings.Contains(value, forUpgrade) {
				pause = Pause{label, value}
			}
		case value != "" && value != "true" && value != "false":
			unknown = append(unknown, Pause{label, value})
		}
	}
	return pause, unknown
}

// pauseEnd is how long all labels must be without a pause before it is over. A driver manager that
// fails restores the labels, and pauses again after its restart.
const pauseEnd = 5 * time.Second

// NodeLabels are the labels of one Node that determine what the node should be. A nil NodeLabels
// stands for a Node that is not read.
type NodeLabels struct {
	// Name is the name of the label that names a profile.
	Name string
	// Replaced is called from Watch when the first Node is read and whenever it is replaced:
	// nothing was written to the new Node yet. Nil disables it.
	Replaced func()
	node     object[labels]

	// mu guards the fields below. pause is the last pause. over is when it is over, zero while a
	// label asks for it.
	mu      sync.Mutex
	pause   Pause
	over    time.Time
	changed func()
}

// labels is the needed part of a Node's metadata.
type labels struct {
	profile, layout string
	// leftTo is why another program makes the Node's MIG layouts; "" if none does.
	leftTo string
	pause  Pause
	// clients are the clientLabels that are "true", separated by commas.
	clients string
	// uid distinguishes a Node from a later one of the same name.
	uid types.UID
	// others are the labels that rules can refer to.
	others map[string]string
}

func (l labels) equal(other labels) bool { return reflect.DeepEqual(l, other) }

// NewNodeLabels returns the NodeLabels of the named Node; Watch reads them. label is the name of
// the label that names a profile.
func NewNodeLabels(client Client, node, label string, log *slog.Logger) *NodeLabels {
	// Like NVIDIA's config-manager, treat an empty label as no label. A state that another program
	// wrote before this program's first read may be outdated.
	var leftover migWriter
	seen, warned := false, map[Pause]bool{}
	of := func(object any) (labels, bool) {
		described, err := meta.Accessor(object)
		if err != nil {
			return labels{}, false
		}
		all := described.GetLabels()
		now := labels{
			profile: all[label],
			layout:  all[MIGLabel],
			uid:     described.GetUID(),
			others:  map[string]string{},
		}
		for name, value := range all {
			if configs.RuleLabel(name) && name != label {
				now.others[name] = value
			}
		}
		now.clients = strings.Join(slices.DeleteFunc(slices.Clone(clientLabels),
			func(label string) bool { return all[label] != "true" }), ",")
		var unknown []Pause
		now.pause, unknown = pauseIn(all)
		for _, label := range unknown {
			if !warned[label] {
				warned[label] = true
				log.Warn("label of the Node not understood, and no pause", "label", label.Label, "value", label.Value)
			}
		}
		writer := otherMIGWriter(described.GetManagedFields())
		if !seen {
			seen, leftover = true, writer
		}
		switch {
		case all[migManagerLabel] == "true":
			now.leftTo = fmt.Sprintf(
				"the label %s of node %s is true, so the GPU Operator's mig-manager makes the MIG layouts; with "+
					"false, Virgate does", migManagerLabel, node)
		case all[migManagerLabel] != "false" && writer.name != "" && writer != leftover:
			now.leftTo = fmt.Sprintf(
				"%s has written the label %s of node %s, so it makes the MIG layouts; when it is gone, and %s is "+
					"false, Virgate does",
				writer.name, migStateLabel, node, migManagerLabel)
		}
		return now, true
	}
	q := kube.Query{
		What:         "node " + node,
		Resource:     "nodes",
		Selector:     kube.ByName(node),
		MetadataOnly: true,
	}
	return &NodeLabels{Name: label, node: newObject(client, q, node, of, labels.equal, log)}
}

// migWriter is a program that writes to the API, and the time of its last write.
type migWriter struct {
	name string
	at   int64
}

// otherMIGWriter returns the program that has written the present migStateLabel; zero if that is
// Virgate.
func otherMIGWriter(fields []metav1.ManagedFieldsEntry) migWriter {
	for _, f := range fields {
		if f.FieldsV1 != nil && f.Time != nil && f.Manager != ownManager &&
			strings.Contains(f.FieldsV1.GetRawString(), `"f:`+migStateLabel+`"`) {
			return migWriter{f.Manager, f.Time.Unix()}
		}
	}
	return migWriter{}
}

// Paused returns the pause that a label of the Node asks for, or has asked for within pauseEnd;
// Watch's changed is called at its end, too. known is false if the Node has not been read or does
// not exist.
func (l *NodeLabels) Paused() (pause Pause, known bool) {
	now, err := l.node.value()
	if err != nil {
		return Pause{}, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case now.pause != Pause{}:
		l.pause, l.over = now.pause, time.Time{}
	case l.pause == Pause{} || l.changed == nil:
	case l.over.IsZero():
		l.over = time.Now().Add(pauseEnd)
		time.AfterFunc(pauseEnd, l.changed)
	case !time.Now().Before(l.over):
		l.pause = Pause{}
	}
	return l.pause, true
}

// RunningClients returns the Node's labels by which the GPU Operator runs DCGM and its exporter, if
// they are true. It returns none if another program makes the MIG layouts, which pauses them
// itself, and before the Node has been read.
func (l *NodeLabels) RunningClients() []string {
	now, err := l.node.value()
	if err != nil || now.clients == "" || now.leftTo != "" {
		return nil
	}
	return strings.Split(now.clients, ",")
}

// Layout returns the profile with the MIG layout that MIGLabel names, if Virgate may partition
// GPUs. Otherwise the label is ignored, known or not. The error names the label and its value, or
// that the Node does not exist; it is configs.ErrPending before the Node has been read.
func (l *NodeLabels) Layout(selected configs.SelectedProfile) (configs.SelectedProfile, error) {
	if l == nil || !selected.Profile.MIG.Manage {
		return selected, nil
	}
	now, err := l.node.value()
	if err != nil {
		return selected, err
	}
	return l.layout(now, selected)
}

// layout is Layout with labels that were read before.
func (l *NodeLabels) layout(now labels, selected configs.SelectedProfile) (configs.SelectedProfile, error) {
	if l == nil || !selected.Profile.MIG.Manage {
		return selected, nil
	}
	selected, err := selected.LeaveMIG(now.leftTo).SelectMIG(now.layout)
	if err != nil {
		return selected, fmt.Errorf("%s: label %s of %s: %w", selected, MIGLabel, l.node.What, err)
	}
	return selected, nil
}

// with returns the labels as they would be if this one had that value.
func (l *NodeLabels) with(name, value string) (labels, error) {
	if l == nil {
		return labels{}, errors.New("no label is looked at there: this Virgate does not know its Node's name")
	}
	now, err := l.node.value()
	switch {
	case err != nil:
	case name == MIGLabel:
		now.layout = value
	case name == l.Name:
		now.profile = value
	default:
		err = fmt.Errorf("the label %s is not looked at there, but %s", name, l.Name)
	}
	return now, err
}

// Watch follows the Node's metadata until ctx ends.
func (l *NodeLabels) Watch(ctx context.Context, changed func()) error {
	var known types.UID
	l.mu.Lock()
	l.changed = changed
	l.mu.Unlock()
	return l.node.Watch(ctx, func() {
		if now, err := l.node.value(); err == nil && now.uid != known {
			known = now.uid
			if l.Replaced != nil {
				l.Replaced()
			}
		}
		changed()
	})
}

// Pods are the pods of one node according to the API server. They need a third watch, whose traffic
// grows with the node's pods, and a separate right. So they are watched only if configured.
type Pods struct {
	watched[map[string]sharing.Container]
}

// NewPods returns the Pods of the named Node; Watch reads them.
func NewPods(client Client, node string, log *slog.Logger) *Pods {
	q := kube.Query{
		What:     "pods of node " + node,
		Resource: "pods",
		Selector: fields.OneTermEqualSelector("spec.nodeName", node),
	}
	return &Pods{newWatched(client, q, containersOf,
		maps.Equal[map[string]sharing.Container, map[string]sharing.Container], log)}
}

// containersOf returns the pod's containers, including init containers, for Containers.
func containersOf(object any) (uid string, containers map[string]sharing.Container, ok bool) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return "", nil, false
	}
	containers = map[string]sharing.Container{}
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if _, id, _ := strings.Cut(status.ContainerID, "://"); id != "" {
			containers[id] = sharing.Container{
				Namespace: pod.Namespace,
				Pod:       pod.Name,
				Name:      status.Name,
			}
		}
	}
	return string(pod.UID), containers, true
}

// Containers returns the containers that run or have run, by ID without the runtime's "://" prefix.
// The error is configs.ErrPending, with nil containers, before the pods have been read. Another
// error is why they are not followed now, for example because the right was revoked; the containers
// are then as last seen.
func (p *Pods) Containers() (map[string]sharing.Container, error) {
	seen := p.store.load()
	if seen.parts == nil {
		return nil, p.store.pending()
	}
	all := map[string]sharing.Container{}
	for _, containers := range seen.parts {
		maps.Copy(all, containers)
	}
	if seen.failure != nil {
		return all, fmt.Errorf("%s: as last seen: %w", p.What, seen.failure)
	}
	return all, nil
}

// PodUID returns the UID of the pod of that name; "" if it is unknown or two pods match.
func (p *Pods) PodUID(namespace, name string) (found string) {
	seen := p.store.load()
	if seen.failure != nil {
		return ""
	}
	for uid, containers := range seen.parts {
		for _, c := range containers {
			if c.Namespace == namespace && c.Pod == name {
				if found != "" && found != uid {
					return ""
				}
				found = uid
			}
		}
	}
	return found
}
