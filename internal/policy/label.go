package policy

import (
	"context"
	"log/slog"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
)

// Label is a label of one Node.
type Label struct {
	// Name is the label's.
	Name string
	seen *single[string]
	feed *feed
}

// NewLabel makes a Label of the named Node; Watch reads it.
func NewLabel(api *API, node, name string, log *slog.Logger) *Label {
	return newLabel(node, name, log, func(into sink) *feed { return api.node(node, into, log) })
}

func newLabel(node, name string, log *slog.Logger, open func(sink) *feed) *Label {
	seen := &single[string]{
		what: "node " + node, name: node, log: log,
		// Without the label and with an empty one there is no choice, as in NVIDIA's
		// config-manager.
		project: func(object runtime.Object) (string, bool) {
			described, err := meta.Accessor(object)
			if err != nil {
				return "", false
			}
			return described.GetLabels()[name], true
		},
		equal: func(a, b string) bool { return a == b },
	}
	return &Label{Name: name, seen: seen, feed: open(seen)}
}

// Value returns the label's value, "" for none. The error is configs.ErrPending
// before the Node has been looked for, or that it is not there.
func (l *Label) Value() (string, error) { return l.seen.value() }

// Watch follows the Node's metadata until ctx ends.
func (l *Label) Watch(ctx context.Context, changed func()) error {
	l.seen.changed = changed
	l.feed.run(ctx)
	return nil
}
