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
// mig-manager does (mig-parted v0.15, pkg/mig/reconfigure). The labels are not Virgate's: the
// Reporter does not write them, and Resume gives them back the value that their owner had set.
type ClientLabels struct{ client client }

const (
	running         = "true"
	pausedForChange = "paused-for-mig-change"
	// deployPrefix is the prefix of all labels by which the operator runs programs.
	deployPrefix = "nvidia.com/gpu.deploy."
)

// NewClientLabels returns the ClientLabels of the named Node. It makes no request yet.
func NewClientLabels(config *rest.Config, node string) (*ClientLabels, error) {
	client, err := connect(config, node, 15*time.Second)
	if err != nil {
		return nil, err
	}
	return &ClientLabels{client}, nil
}

// Pause pauses the programs whose label, among labels, is "true".
func (l *ClientLabels) Pause(ctx context.Context, labels []string) error {
	return l.client.relabel(ctx, labels, running, pausedForChange)
}

// Resume undoes Pause for each label that has not been changed since.
func (l *ClientLabels) Resume(ctx context.Context, labels []string) error {
	return l.client.relabel(ctx, labels, pausedForChange, running)
}

// relabel changes each label that has the value from to the value to. The API server compares the
// values, so a value that another client writes meanwhile stays. A Node that is gone is no error.
func (c client) relabel(ctx context.Context, labels []string, from, to string) error {
	var failed []error
	for _, label := range labels {
		path := "/metadata/labels/" + pointerPart(label)
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
		if apierrors.IsInvalid(err) { // Its value is another one, or an admission policy refuses with the same code.
			meta, unread := c.metadata(ctx)
			// The operator's driver manager appends its pause to a value, and removes it again.
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
