package nodestatus

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
)

// Outputs of feature labels.
const (
	// FeaturesToNode writes the labels to the Node itself.
	FeaturesToNode = "node"
	// FeaturesToFile writes a file from which NFD, node feature discovery, makes labels.
	FeaturesToFile = "nfd-file"
	// FeaturesToNFD writes a NodeFeature object from which NFD makes labels.
	FeaturesToNFD = "nfd-api"
)

// FeatureOutput is where feature labels are written.
type FeatureOutput struct {
	// Kind is one of the constants above; empty if feature labels are written nowhere.
	Kind string
	// File is the path of the file. Namespace and Name are those of the NodeFeature.
	File, Namespace, Name string
	// Pod is the name of this program's pod in Namespace; empty if unknown. The NodeFeature is
	// removed once the pod and its DaemonSet are gone.
	Pod string
}

// NeedsAPI reports whether the output requires an API server.
func (o FeatureOutput) NeedsAPI() bool { return o.Kind == FeaturesToNode || o.Kind == FeaturesToNFD }

// recheck is how often feature labels are checked. Another program may have removed them: NFD does
// that with the labels of a GPU feature discovery that has gone.
const recheck = 5 * time.Minute

const (
	// FeaturesAnnotation has the names of the feature labels that Virgate wrote.
	FeaturesAnnotation = "virgate.github.io/feature-labels"
	// nfdAnnotation has the names of the labels that NFD wrote. Another instance of NFD puts its own
	// name in front of the key (node-feature-discovery, pkg/apis/nfd/v1alpha1/annotations_labels.go).
	nfdAnnotation = "nfd.node.kubernetes.io/feature-labels"
)

// addFeatures adds the changes to the patch that turn the Node's feature labels into the wanted
// ones. It leaves out the labels that NFD writes.
func (m *metadata) addFeatures(ctx context.Context, wanted map[string]string, patch objectMeta) error {
	node, err := m.client.read(ctx)
	if err != nil {
		return err
	}
	var nfd, ours, left []string
	for key, names := range node.Annotations {
		if key == nfdAnnotation || strings.HasSuffix(key, "."+nfdAnnotation) {
			nfd = append(nfd, strings.Split(names, ",")...)
		}
	}
	for _, label := range slices.Sorted(maps.Keys(wanted)) {
		value := wanted[label]
		if slices.Contains(nfd, label) {
			left = append(left, label)
			continue
		}
		ours = append(ours, label)
		if now, there := node.Labels[label]; !there || now != value {
			patch.Labels[label] = &value
		}
	}
	if !slices.Equal(left, m.leftToNFD) && len(left) > 0 {
		m.log.Warn("feature labels are left to node feature discovery, which writes them", "labels",
			strings.Join(left, ","))
	}
	m.leftToNFD = left
	before, marked := node.Annotations[FeaturesAnnotation]
	for _, label := range strings.Split(before, ",") {
		if _, there := node.Labels[label]; there && !slices.Contains(ours, label) &&
			!slices.Contains(nfd, label) {
			patch.Labels[label] = nil
		}
	}
	if names := strings.Join(ours, ","); !marked || names != before {
		patch.Annotations[FeaturesAnnotation] = &names
	}
	return nil
}

// WriteFeatureFile writes the labels in the format of NFD's features.d. It replaces the file as a
// whole, so that no program reads half of it. It does nothing if the labels are already in the file.
func WriteFeatureFile(path string, labels map[string]string) error {
	var content bytes.Buffer
	_ = PrintFeatures(&content, labels) // Writing to a buffer never fails.
	if now, err := os.ReadFile(path); err == nil && bytes.Equal(now, content.Bytes()) {
		return nil
	}
	// NFD reads the files in its folder, but not in subfolders.
	next, err := os.MkdirTemp(filepath.Dir(path), ".virgate-")
	if err == nil {
		file := filepath.Join(next, "features")
		err = os.WriteFile(file, content.Bytes(), 0o644) //nolint:gosec // NFD may run as another user.
		if err == nil {
			err = os.Rename(file, path)
		}
		err = errors.Join(err, os.RemoveAll(next))
	}
	if err != nil {
		return fmt.Errorf("write feature labels: %w", err)
	}
	return nil
}

// PrintFeatures writes the labels in the format of NFD's features.d.
func PrintFeatures(w io.Writer, labels map[string]string) error {
	for _, label := range slices.Sorted(maps.Keys(labels)) {
		if _, err := fmt.Fprintf(w, "%s=%s\n", label, labels[label]); err != nil {
			return err
		}
	}
	return nil
}

// featureFile writes the labels to the file at path.
type featureFile struct{ path string }

func (f featureFile) write(_ context.Context, report nodereport.Report) (again time.Duration, err error) {
	if report.Features == nil {
		return 0, nil
	}
	return recheck, WriteFeatureFile(f.path, report.Features)
}

// NodeFeatureName returns the name of the Node's NodeFeature.
func NodeFeatureName(node string) string { return "virgate-features-for-" + node }

// NodeFeature is an object from which NFD labels the Node.
type NodeFeature struct {
	client client
	FeatureOutput
}

// NewNodeFeature returns a NodeFeature. It makes no request yet.
func NewNodeFeature(config *rest.Config, node string, output FeatureOutput) (*NodeFeature, error) {
	client, err := connect(config, node, defaultTiming().request)
	return &NodeFeature{client: client, FeatureOutput: output}, err
}

func (f *NodeFeature) write(ctx context.Context, report nodereport.Report) (again time.Duration, err error) {
	if report.Features == nil {
		return 0, nil
	}
	return recheck, f.Write(ctx, report.Features)
}

// nodeFeature has the fields of a NodeFeature that matter here.
type nodeFeature struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   metav1.ObjectMeta `json:"metadata"`
	Spec       struct {
		Features map[string]any    `json:"features"`
		Labels   map[string]string `json:"labels"`
	} `json:"spec"`
}

const (
	nfdAPI = "/apis/nfd.k8s-sigs.io/v1alpha1"
	// ofNode is the label by which NFD finds the Node of a NodeFeature.
	ofNode = "nfd.node.kubernetes.io/node-name"
)

// Write sets the feature labels in the object. It creates the object if there is none.
func (f *NodeFeature) Write(ctx context.Context, labels map[string]string) error {
	path := []string{nfdAPI, "namespaces", f.Namespace, "nodefeatures"}
	what, one := "write NodeFeature "+f.Namespace+"/"+f.Name, append(slices.Clone(path), f.Name)
	var now nodeFeature
	answer := f.client.Do(ctx, f.client.Get().AbsPath(one...))
	err := answer.Error()
	missing := apierrors.IsNotFound(err)
	if err == nil {
		data, _ := answer.Raw()
		err = json.Unmarshal(data, &now)
	}
	if err != nil && !missing {
		return fmt.Errorf("%s: %w", what, err)
	}
	owners, known, err := f.owners(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if !known {
		owners = now.Metadata.OwnerReferences
	}
	sameOwners := equality.Semantic.DeepEqual(owners, now.Metadata.OwnerReferences)
	if !missing && sameOwners && maps.Equal(now.Spec.Labels, labels) && now.Metadata.Labels[ofNode] == f.client.node {
		return nil
	}
	next := nodeFeature{APIVersion: "nfd.k8s-sigs.io/v1alpha1", Kind: "NodeFeature"}
	next.Metadata = metav1.ObjectMeta{
		Name:            f.Name,
		Namespace:       f.Namespace,
		ResourceVersion: now.Metadata.ResourceVersion,
		Labels:          map[string]string{ofNode: f.client.node},
		OwnerReferences: owners,
	}
	next.Spec.Labels = labels
	// All three are required.
	next.Spec.Features = map[string]any{
		"flags":      struct{}{},
		"attributes": struct{}{},
		"instances":  struct{}{},
	}
	request := f.client.Put().AbsPath(one...)
	if missing {
		request = f.client.Post().AbsPath(path...)
	}
	return f.client.Write(ctx, what, request.SetHeader("Content-Type", "application/json"), next)
}

// owners returns the same owners as GPU feature discovery (k8s-device-plugin v0.19.3,
// internal/lm/output.go): the DaemonSet of this program's pod, as controller, and the pod.
// Kubernetes removes the object when all owners are gone. A pod that belongs to no DaemonSet gives
// no owners. known is false if the pod is not known or cannot be read.
func (f *NodeFeature) owners(ctx context.Context) (owners []metav1.OwnerReference, known bool, err error) {
	if f.Pod == "" {
		return nil, false, nil
	}
	var pod metav1.PartialObjectMetadata
	request := kube.MetadataOnly(f.client.Get().Namespace(f.Namespace).Resource("pods").Name(f.Pod))
	err = f.client.Do(ctx, request).Into(&pod)
	switch {
	case apierrors.IsForbidden(err) || apierrors.IsNotFound(err):
		return nil, false, nil
	case err != nil:
		return nil, false, fmt.Errorf("read pod %s: %w", f.Pod, err)
	}
	i := slices.IndexFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" })
	if i < 0 {
		return nil, true, nil
	}
	set := pod.OwnerReferences[i]
	return []metav1.OwnerReference{
		{
			APIVersion: set.APIVersion,
			Kind:       set.Kind,
			Name:       set.Name,
			UID:        set.UID,
			Controller: new(true),
		},
		{
			APIVersion: "v1",
			Kind:       "Pod",
			Name:       pod.Name,
			UID:        pod.UID,
		},
	}, true, nil
}
