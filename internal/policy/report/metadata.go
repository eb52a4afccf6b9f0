package report

import (
	"context"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/sharing"
)

const (
	// ProfileAnnotation has the name of the profile in force; it is missing where
	// the profile has none, and before the first is in force.
	ProfileAnnotation = "virgate.github.io/profile"
	// SourceAnnotation has where that was read.
	SourceAnnotation = "virgate.github.io/source"
	// GenerationAnnotation has its generation.
	GenerationAnnotation = "virgate.github.io/generation"
	// StateLabel has the state of the profile that should be in force: one of
	// sharing.ProfileStates. It lies beside the label by which NVIDIA's
	// config-manager chooses a profile.
	StateLabel = "nvidia.com/device-plugin.config.state"
	// MIGStateLabel has the state of the wanted MIG layout in mig-manager's words
	// (mig-parted v0.15, deployments/container): success, pending or failed. It is
	// written only where Virgate cuts boards, so that mig-manager's own stays.
	MIGStateLabel = "nvidia.com/mig.config.state"
)

// metadata writes the Node's annotations and labels.
type metadata struct {
	reports reports
	client  client
	// written is what the Node was last given; nil while that is not known.
	written *objectMeta
}

// objectMeta is a patch of a Node's metadata. A nil value takes the key away.
type objectMeta struct {
	Annotations map[string]*string `json:"annotations"`
	Labels      map[string]*string `json:"labels"`
}

func (m *metadata) forget() { m.written = nil }

func (m *metadata) write(ctx context.Context) (again time.Duration, err error) {
	report, ok := m.reports.report()
	if !ok {
		return 0, nil
	}
	wanted := metadataOf(report)
	if m.written != nil {
		wanted.takeAway(*m.written)
		if wanted.equal(*m.written) {
			return 0, nil
		}
	}
	patch := struct {
		Metadata objectMeta `json:"metadata"`
	}{wanted}
	if err := m.client.patchNode(ctx, types.StrategicMergePatchType, patch); err != nil {
		return 0, err
	}
	m.written = &wanted
	return 0, nil
}

// metadataOf is what the report says in annotations and labels.
func metadataOf(report sharing.NodeReport) objectMeta {
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
	if state := report.LayoutState(); state != "" {
		wanted.Labels[MIGStateLabel] = &state
	}
	return wanted
}

// takeAway takes the labels away that were written and are not wanted any more.
func (m objectMeta) takeAway(written objectMeta) {
	for key := range written.Labels {
		if _, wanted := m.Labels[key]; !wanted {
			m.Labels[key] = nil
		}
	}
}

func (m objectMeta) equal(other objectMeta) bool {
	same := func(a, b *string) bool { return a == nil && b == nil || a != nil && b != nil && *a == *b }
	return maps.EqualFunc(m.Annotations, other.Annotations, same) && maps.EqualFunc(m.Labels, other.Labels, same)
}
