package nodestatus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// ClientLabels pauses programs that the GPU Operator runs by labels of the Node, as NVIDIA's
// mig-manager does (mig-parted v0.15, pkg/mig/reconfigure). They are not among what the Reporter
// writes: whoever has set them has them back.
type ClientLabels struct{ client client }

const (
	running         = "true"
	pausedForChange = "paused-for-mig-change"
	// deployPrefix is that of all labels by which the operator runs programs.
	deployPrefix = "nvidia.com/gpu.deploy."
)

// NewClientLabels makes the ClientLabels of the named Node, and asks nothing of the API yet.
func NewClientLabels(config *rest.Config, node string) (*ClientLabels, error) {
	client, err := connect(config, node, 15*time.Second)
	if err != nil {
		return nil, err
	}
	return &ClientLabels{client}, nil
}

// Pause pauses the programs of those of the labels that are "true".
func (l *ClientLabels) Pause(ctx context.Context, labels []string) error {
	return l.client.relabel(ctx, labels, running, pausedForChange)
}

// Resume undoes Pause, as far as nobody has changed a label since.
func (l *ClientLabels) Resume(ctx context.Context, labels []string) error {
	return l.client.relabel(ctx, labels, pausedForChange, running)
}

// relabel changes each of the labels that has the one value to the other one. The API server compares, so what somebody
// else writes meanwhile stays. A Node that is gone has none.
func (c client) relabel(ctx context.Context, labels []string, from, to string) error {
	var failed []error
	for _, label := range labels {
		path := "/metadata/labels/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(label)
		operations := []map[string]string{
			{
				"op":    "test",
				"path":  path,
				"value": from,
			},
			{
				"op":    "replace",
				"path":  path,
				"value": to,
			},
		}
		err := c.patchNode(ctx, types.JSONPatchType, operations)
		if apierrors.IsInvalid(err) { // It has another value. Or an admission policy refuses with the same code.
			meta, unread := c.metadata(ctx)
			// The operator's driver manager puts its pause behind a value, and takes that away again.
			if value := meta.Labels[label]; unread == nil && value != from && !strings.HasPrefix(value, from+"_") {
				err = nil
			}
		}
		if err != nil && !apierrors.IsNotFound(err) {
			failed = append(failed, fmt.Errorf("label %s: %w", label, err))
		}
	}
	return errors.Join(failed...)
}
