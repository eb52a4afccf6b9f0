package policy

import (
	"context"
	"fmt"
	"log/slog"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/configs"
)

// MIGLabel is the Node's label that names a MIG layout, as for NVIDIA's
// mig-manager (mig-parted v0.15, deployments/container).
const MIGLabel = "nvidia.com/mig.config"

// Labels are the labels of one Node that say what the node should be. The nil
// Labels are those of a Node that is not looked at.
type Labels struct {
	// Name is that of the label that names a profile.
	Name string
	// Replaced is called from Watch, whenever a Node is seen that is another one
	// than before, the first one included: it says nothing yet of what was written
	// to the Node before. Nil for nobody.
	Replaced func()
	what     string
	seen     *single[labels]
	feed     *feed
}

// labels is what is wanted of a Node's metadata.
type labels struct {
	profile, layout string
	// uid tells a Node from its successor of the same name.
	uid types.UID
}

// NewLabels makes the Labels of the named Node; Watch reads them. Name is that of
// the label that names a profile.
func NewLabels(api *API, node, name string, log *slog.Logger) *Labels {
	return newLabels(node, name, log, func(into sink) *feed { return api.node(node, into, log) })
}

func newLabels(node, name string, log *slog.Logger, open func(sink) *feed) *Labels {
	what := "node " + node
	seen := &single[labels]{
		what: what, name: node, log: log,
		// Without a label and with an empty one there is no choice, as in NVIDIA's
		// config-manager.
		project: func(object runtime.Object) (labels, bool) {
			described, err := meta.Accessor(object)
			if err != nil {
				return labels{}, false
			}
			all := described.GetLabels()
			return labels{profile: all[name], layout: all[MIGLabel], uid: described.GetUID()}, true
		},
		equal: func(a, b labels) bool { return a == b },
	}
	return &Labels{Name: name, what: what, seen: seen, feed: open(seen)}
}

// Layout returns the profile with the MIG layout that MIGLabel names, where
// Virgate may cut boards. Elsewhere the label is nothing to it, also while it is
// not known. The error names the label and its value, or is configs.ErrPending
// before the Node has been looked for, or that it is not there.
func (l *Labels) Layout(selected configs.Selected) (configs.Selected, error) {
	if l == nil || !selected.Profile.MIG.Manage {
		return selected, nil
	}
	now, err := l.seen.value()
	if err != nil {
		return selected, err
	}
	return l.layout(now, selected)
}

func (l *Labels) layout(now labels, selected configs.Selected) (configs.Selected, error) {
	if l == nil || !selected.Profile.MIG.Manage {
		return selected, nil
	}
	selected, err := selected.SelectMIG(now.layout)
	if err != nil {
		return selected, fmt.Errorf("%s: label %s of %s: %w", selected, MIGLabel, l.what, err)
	}
	return selected, nil
}

// Watch follows the Node's metadata until ctx ends.
func (l *Labels) Watch(ctx context.Context, changed func()) error {
	var known types.UID
	l.seen.changed = func() {
		if now, err := l.seen.value(); err == nil && now.uid != known {
			known = now.uid
			if l.Replaced != nil {
				l.Replaced()
			}
		}
		changed()
	}
	l.feed.run(ctx)
	return nil
}
