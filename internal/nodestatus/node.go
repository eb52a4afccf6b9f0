package nodestatus

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
)

const (
	// ProfileAnnotation has the name of the profile in force. It is missing if that profile has no
	// name, and before the first profile is in force.
	ProfileAnnotation = "virgate.github.io/profile"
	// SourceAnnotation has the source from which that profile was read.
	SourceAnnotation = "virgate.github.io/source"
	// GenerationAnnotation has the generation of that profile.
	GenerationAnnotation = "virgate.github.io/generation"
	// WantedAnnotation has the name of the profile that should be in force. Without rules, it and
	// the next two annotations are missing.
	WantedAnnotation = "virgate.github.io/wanted"
	// WantedByAnnotation has the reason for that profile: "rule 2 of ConfigMap gpu/profiles".
	WantedByAnnotation = "virgate.github.io/wanted-by"
	// RulesAnnotation identifies the list of rules.
	RulesAnnotation = "virgate.github.io/rules"
	// StateLabel has the state of the profile that should be in force: one of nodereport.ProfileStates.
	// Its key extends the key of the label by which NVIDIA's config-manager chooses a profile.
	StateLabel = "nvidia.com/device-plugin.config.state"
	// MIGStateLabel has the state of the wanted MIG layout in mig-manager's words (mig-parted
	// v0.15, deployments/container): success, pending or failed. It is written only if Virgate
	// changes MIG layouts, so that mig-manager's own value stays otherwise.
	MIGStateLabel = "nvidia.com/mig.config.state"
)

type metadata struct {
	client client
	// features turns on the feature labels, and noProfile turns off everything about the profile.
	// Both are written in one patch, so that no client sees one without the other.
	features, noProfile bool
	log                 *slog.Logger
	// written is what was last written to the Node about the profile; nil if that is not known.
	written *objectMeta
	// leftToNFD are the feature labels that were last found to be written by NFD.
	leftToNFD []string
	// looked is true once the Node has no MIGStateLabel of an earlier run.
	looked bool
}

// objectMeta is a patch of a Node's metadata. A nil value removes the key.
type objectMeta struct {
	Annotations map[string]*string `json:"annotations"`
	Labels      map[string]*string `json:"labels"`
}

func (m *metadata) write(ctx context.Context, report nodereport.Report) (again time.Duration, err error) {
	wanted, patch := metadataOf(report), objectMeta{Annotations: map[string]*string{}, Labels: map[string]*string{}}
	if m.written != nil {
		for key := range m.written.Labels {
			if _, stays := wanted.Labels[key]; !stays && (key != MIGStateLabel || !report.LayoutsLeft) {
				wanted.Labels[key] = nil
			}
		}
	}
	if report.NoLayout && !report.LayoutsLeft && !m.looked && !m.noProfile {
		// An earlier run may have written a layout's state. What mig-manager wrote stays.
		meta, err := m.client.metadata(ctx)
		if err != nil {
			return 0, err
		}
		if wrote(meta, "f:labels", MIGStateLabel) {
			wanted.Labels[MIGStateLabel] = nil
		}
	}
	if !m.noProfile && (m.written == nil || !reflect.DeepEqual(wanted, *m.written)) {
		maps.Copy(patch.Annotations, wanted.Annotations)
		maps.Copy(patch.Labels, wanted.Labels)
	}
	if m.features && report.Features != nil {
		if err := m.addFeatures(ctx, report.Features, patch); err != nil {
			return 0, err
		}
		again = recheck
	}
	if len(patch.Annotations) > 0 || len(patch.Labels) > 0 {
		if err := m.client.patchNode(ctx, types.StrategicMergePatchType,
			map[string]any{"metadata": patch}); err != nil {
			return 0, err
		}
	}
	m.written, m.looked = &wanted, m.looked || report.NoLayout && !report.LayoutsLeft
	return again, nil
}

// wrote reports whether Virgate was the last to write the object's value under that key in f:labels
// or f:annotations. The API records who wrote each value last.
func wrote(meta metav1.ObjectMeta, section, key string) bool {
	return slices.ContainsFunc(meta.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool {
		var fields struct {
			Metadata map[string]map[string]any `json:"f:metadata"`
		}
		if entry.Manager != kube.FieldManager || entry.FieldsV1 == nil ||
			json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
			return false
		}
		_, found := fields.Metadata[section]["f:"+key]
		return found
	})
}

func metadataOf(report nodereport.Report) objectMeta {
	value := func(text string) *string {
		if text == "" {
			return nil
		}
		return &text
	}
	wanted := objectMeta{
		Annotations: map[string]*string{
			ProfileAnnotation:    value(report.Applied.Name),
			SourceAnnotation:     value(report.Applied.Source),
			GenerationAnnotation: value(report.Applied.Generation),
		},
		Labels: map[string]*string{StateLabel: value(string(report.State))},
	}
	for _, name := range []string{WantedAnnotation, WantedByAnnotation, RulesAnnotation} {
		wanted.Annotations[name] = nil
	}
	if w := report.Wanted; w.Rules != "" {
		wanted.Annotations[WantedAnnotation] = value(w.Name)
		wanted.Annotations[WantedByAnnotation] = value(w.By)
		wanted.Annotations[RulesAnnotation] = &w.Rules
	}
	if state := report.LayoutState(); state != "" {
		wanted.Labels[MIGStateLabel] = &state
	}
	return wanted
}

// ConditionType is the Node's condition that says whether pods can get what the profile in force offers.
const ConditionType = "GPUSharingReady"

// maxMessage limits the length of messages, in bytes: Kubernetes' newer Event API refuses longer
// ones (kubernetes, pkg/apis/core/validation/events.go).
const maxMessage = 1024

type condition struct {
	client client
	// written is the condition as the Node has it, without a type if the Node has none; nil if that
	// is not known.
	written *corev1.NodeCondition
	// heartbeat is Options.Heartbeat, and beat is when the next one is due. That time is random, so
	// that nodes whose condition was written together do not write together again.
	heartbeat time.Duration
	beat      time.Time
}

func (c *condition) read(ctx context.Context) error {
	n, err := c.client.read(ctx)
	if err != nil {
		return err
	}
	c.written = &corev1.NodeCondition{}
	if i := slices.IndexFunc(n.Status.Conditions,
		func(c corev1.NodeCondition) bool { return c.Type == ConditionType }); i >= 0 {
		c.written = &n.Status.Conditions[i]
	}
	return nil
}

func (c *condition) write(ctx context.Context, report nodereport.Report) (again time.Duration, err error) {
	if c.written == nil {
		// An earlier run may have written it; its time must not start again.
		if err := c.read(ctx); err != nil {
			return 0, err
		}
	}
	next := corev1.NodeCondition{
		Type:               ConditionType,
		Status:             corev1.ConditionStatus(report.Ready),
		Reason:             report.Reason,
		Message:            truncate(report.Message),
		LastHeartbeatTime:  metav1.Now(),
		LastTransitionTime: c.written.LastTransitionTime,
	}
	same := next.Status == c.written.Status
	if same && next.Reason == c.written.Reason && next.Message == c.written.Message {
		if left := time.Until(c.beat); c.heartbeat == 0 || left > 0 {
			return max(0, left), nil
		}
	}
	if !same || next.LastTransitionTime.IsZero() {
		next.LastTransitionTime = next.LastHeartbeatTime
	}
	// A strategic merge patch merges conditions by type (k8s.io/api/core/v1, NodeStatus).
	patch := map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{next}}}
	if err := c.client.patchNode(ctx, types.StrategicMergePatchType, patch, "status"); err != nil {
		return 0, err
	}
	c.written = &next
	if c.heartbeat == 0 {
		return 0, nil
	}
	again = wait.Jitter(c.heartbeat, 0.2)
	c.beat = time.Now().Add(again)
	return again, nil
}

// staleResources removes stopped resources from the Node's capacity. The kubelet leaves them there
// with the value 0 for ever (kubernetes/kubernetes#52510). It drops them from allocatable by itself
// once the capacity is gone (pkg/kubelet/nodestatus/setters.go).
type staleResources struct {
	client client
	grace  time.Duration
	// done are the resources that need nothing more, as they were reported.
	done map[nodereport.GoneResource]bool
}

func (r *staleResources) write(ctx context.Context, report nodereport.Report) (again time.Duration, err error) {
	var due []nodereport.GoneResource
	for _, gone := range report.Gone {
		if r.done[gone] {
			continue
		}
		if left := time.Until(gone.Since.Add(r.grace)); left <= 0 {
			due = append(due, gone)
		} else if again == 0 || left < again {
			again = left
		}
	}
	if len(due) == 0 {
		return again, nil
	}
	node, err := r.client.read(ctx)
	if err != nil {
		return 0, err
	}
	for _, gone := range due {
		if count, there := node.Status.Capacity[corev1.ResourceName(gone.Name)]; there && count.IsZero() {
			if err := r.remove(ctx, gone.Name); err != nil {
				return 0, err
			}
		}
		r.done[gone] = true // A resource with another value belongs to another program.
	}
	return again, nil
}

// remove removes the resource if its capacity is still 0. Otherwise the API refuses the whole
// patch, which is no error here.
func (r *staleResources) remove(ctx context.Context, name string) error {
	path := "/status/capacity/" + pointerPart(name)
	operations := []map[string]string{{
		"op":    "test",
		"path":  path,
		"value": "0",
	}, {"op": "remove", "path": path}}
	err := r.client.patchNode(ctx, types.JSONPatchType, operations, "status")
	if err != nil && !apierrors.IsInvalid(err) {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return nil
}
