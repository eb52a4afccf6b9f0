package report

import (
	"context"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/sharing"
)

// remover takes resources that were stopped out of the Node's capacity. The
// kubelet leaves them there with the value 0 for ever
// (kubernetes/kubernetes#52510), and drops what is allocatable of them by
// itself once the capacity is gone (pkg/kubelet/nodestatus/setters.go).
type remover struct {
	reports reports
	client  client
	grace   time.Duration
	// done are those that need nothing more, as they were reported.
	done map[sharing.GoneResource]bool
}

func (r *remover) forget() { r.done = nil }

func (r *remover) write(ctx context.Context) (again time.Duration, err error) {
	report, ok := r.reports.report()
	if !ok {
		return 0, nil
	}
	var due []sharing.GoneResource
	for _, gone := range report.Gone {
		if r.done[gone] {
			continue
		}
		if wait := time.Until(gone.Since.Add(r.grace)); wait <= 0 {
			due = append(due, gone)
		} else if again == 0 || wait < again {
			again = wait
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
		if node.Status.Capacity[gone.Name] == "0" {
			if err := r.remove(ctx, gone.Name); err != nil {
				return 0, err
			}
		}
		// What has another value is somebody else's.
		if r.done == nil {
			r.done = map[sharing.GoneResource]bool{}
		}
		r.done[gone] = true
	}
	return again, nil
}

// remove takes the resource away if its capacity is still 0: the API refuses
// the whole patch otherwise, and that is well.
func (r *remover) remove(ctx context.Context, name string) error {
	type operation struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value string `json:"value,omitempty"`
	}
	path := "/status/capacity/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(name)
	err := r.client.patchNode(ctx, types.JSONPatchType, []operation{{"test", path, "0"}, {"remove", path, ""}}, "status")
	if apierrors.IsInvalid(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return nil
}
