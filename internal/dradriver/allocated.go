package dradriver

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/virgate/virgate/internal/kube"
)

// Allocated returns the names of this node's devices that are allocated to claims anywhere in the
// cluster, by the claim's UID, even if the kubelet has not prepared them yet.
func (d *Driver) Allocated(ctx context.Context) (map[string][]string, error) {
	devices := map[string][]string{}
	q := kube.Query{
		What:     "ResourceClaims",
		Path:     resourceAPI,
		Resource: resourceClaims,
	}
	err := kube.Pages(ctx, d.api, q, func(page *resourceapi.ResourceClaimList) {
		for _, claim := range page.Items {
			if claim.Status.Allocation == nil {
				continue
			}
			for _, result := range claim.Status.Allocation.Devices.Results {
				if result.Driver == d.options.Driver && result.Pool == d.pool {
					uid := string(claim.UID)
					devices[uid] = append(devices[uid], result.Device)
				}
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return devices, nil
}
