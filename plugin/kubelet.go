package plugin

import (
	"context"

	"github.com/virgate/virgate/sharing"
)

// Kubelet tells what the kubelet knows of devices. Manager calls it from one
// goroutine of its own, servers call Serving from theirs; no call holds up a
// list, an allocation or the end of the program.
type Kubelet interface {
	// Held returns who holds which devices now. It fails rather than return an
	// incomplete answer. An allocation without a namespace may be of a pod that
	// is gone, which the kubelet forgets at the latest when it next gets a list.
	Held(ctx context.Context) ([]sharing.Allocation, error)
	// Applied returns the devices that the kubelet believes to be Healthy, by
	// resource.
	Applied(ctx context.Context) (map[string][]string, error)
	// Serving says whether the kubelet is connected to a plugin that offers
	// Healthy devices of the resource.
	Serving(ctx context.Context, resource string) (bool, error)
}
