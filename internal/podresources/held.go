package podresources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/virgate/virgate/sharing"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// settling is how long after a kubelet's start PodResources alone is not
// believed: it is served before the API server's pods are known again.
const settling = time.Minute

// Held returns who holds which devices, of every resource and not only of this
// plugin's, sorted by namespace, pod, container and resource; nil when nobody
// holds any.
//
// It is what PodResources shows and what else the checkpoint knows. Of a pod
// that PodResources does not show only the UID is known: its Namespace is empty
// and its Pod is "uid:" and the UID. Such an allocation may belong to a pod
// that is gone; the kubelet forgets it when it next writes its checkpoint,
// which any list from a plugin makes it do. A device that an init container
// handed on to another one may be there for both.
//
// The error is ErrIncomplete or ErrUnknown, with the causes.
func (s *Source) Held(ctx context.Context) ([]sharing.Allocation, error) {
	listed, listErr := call(ctx, s, func(ctx context.Context, client api.PodResourcesListerClient) (*api.ListPodResourcesResponse, error) {
		return client.List(ctx, &api.ListPodResourcesRequest{})
	})
	// Read after List: what was admitted in between is in the file.
	checkpoint, fileErr := s.readCheckpoint()
	switch {
	case listErr != nil && fileErr != nil:
		return nil, unknown(listErr, fileErr)
	case listErr != nil:
		s.logger.Debug("held devices read from the checkpoint alone", "error", listErr)
	case fileErr != nil:
		if err := s.settled(); err != nil && !s.unused(fileErr) {
			return nil, fmt.Errorf("%w: %w; checkpoint: %w", ErrIncomplete, err, fileErr)
		}
		s.logger.Debug("held devices read from PodResources alone", "error", fileErr)
	}
	return merge(listed.GetPodResources(), checkpoint.Entries), nil
}

// Applied returns the devices that the kubelet takes for healthy, held or not,
// sorted, by resource. A resource without healthy devices, or without a plugin,
// is not in the map, which must not be changed.
//
// Without PodResources it is what the checkpoint had at the kubelet's last
// write. That is right after each list, but does not show that a plugin's
// stream has ended.
//
// The error is ErrUnknown, with the causes.
func (s *Source) Applied(ctx context.Context) (map[string][]string, error) {
	healthy, listErr := s.allocatable(ctx)
	if listErr == nil {
		return healthy, nil
	}
	checkpoint, fileErr := s.readCheckpoint()
	if fileErr != nil {
		return nil, unknown(listErr, fileErr)
	}
	s.logger.Debug("applied devices read from the checkpoint", "error", listErr)
	return checkpoint.Registered, nil
}

func unknown(listErr, fileErr error) error {
	return fmt.Errorf("%w: PodResources: %w; checkpoint: %w", ErrUnknown, listErr, fileErr)
}

// unused says that no pod of the kubelet can hold a device that PodResources does
// not show: its directory has no checkpoint. The kubelet reads that at its start,
// before it makes kubelet.sock, and writes it with every list and every grant, so
// what it has forgotten it will not remember in a minute either.
func (s *Source) unused(fileErr error) bool {
	_, err := s.started()
	return err == nil && errors.Is(fileErr, fs.ErrNotExist)
}

// settled returns why PodResources may not know of all pods yet: the kubelet has
// started lately, or nobody knows when.
func (s *Source) settled() error {
	started, err := s.started()
	if err != nil {
		return fmt.Errorf("time of the kubelet's start unknown: %w", err)
	}
	if age := s.options.Now().Sub(started); age < settling {
		return fmt.Errorf("kubelet started %v ago", age.Round(time.Second))
	}
	return nil
}

// started is when the kubelet made kubelet.sock, as it does at each start.
func (s *Source) started() (time.Time, error) {
	if s.options.CheckpointDir == "" {
		return time.Time{}, errNoCheckpoint
	}
	info, err := os.Stat(filepath.Join(s.options.CheckpointDir, "kubelet.sock"))
	if err != nil {
		return time.Time{}, err
	}
	return info.ModTime(), nil
}
