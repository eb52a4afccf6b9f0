package report

import (
	"context"
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
)

// metadata writes the Node's annotations and label.
type metadata struct {
	reports interface {
		report() (sharing.NodeReport, bool)
	}
	client  client
	refresh time.Duration
	// written is what the Node was last given, until it is time to give it again.
	written   *objectMeta
	writtenAt time.Time
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
	if m.written != nil && wanted.equal(*m.written) && !due(m.writtenAt, m.refresh) {
		return m.refresh, nil
	}
	patch := struct {
		Metadata objectMeta `json:"metadata"`
	}{wanted}
	if err := m.client.patchNode(ctx, types.StrategicMergePatchType, patch); err != nil {
		return 0, err
	}
	m.written, m.writtenAt = &wanted, time.Now()
	return m.refresh, nil
}

// due says that what was written at that time is to be written again. Refreshing
// early by a hundredth keeps a timer's rounding from skipping one.
func due(at time.Time, refresh time.Duration) bool {
	return refresh > 0 && time.Since(at) >= refresh-refresh/100
}

// metadataOf is what the report says in annotations and label.
func metadataOf(report sharing.NodeReport) objectMeta {
	value := func(text string) *string {
		if text == "" {
			return nil
		}
		return &text
	}
	return objectMeta{
		Annotations: map[string]*string{
			ProfileAnnotation:    value(report.Applied.Name),
			SourceAnnotation:     value(report.Applied.Source),
			GenerationAnnotation: value(report.Applied.Generation),
		},
		Labels: map[string]*string{StateLabel: value(string(report.State))},
	}
}

func (m objectMeta) equal(other objectMeta) bool {
	return sameValues(m.Annotations, other.Annotations) && sameValues(m.Labels, other.Labels)
}

// sameValues compares maps that have the same keys.
func sameValues(a, b map[string]*string) bool {
	for key, value := range a {
		other := b[key]
		if (value == nil) != (other == nil) || value != nil && *value != *other {
			return false
		}
	}
	return true
}
