package dradriver

import (
	"context"
	"fmt"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
)

// claimsPage is the number of claims per page of a list.
const claimsPage = 500

// Allocated returns the names of this node's devices that are allocated to claims anywhere in the
// cluster, by the claim's UID, even if the kubelet has not prepared them yet.
func (d *Driver) Allocated(ctx context.Context) (map[string][]string, error) {
	devices := map[string][]string{}
	for next := ""; ; {
		list, err := d.listClaims(ctx, next)
		if err != nil {
			return nil, fmt.Errorf("list ResourceClaims: %w", err)
		}
		for _, claim := range list.Items {
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
		next = list.Continue
		if next == "" {
			return devices, nil
		}
	}
}

func (d *Driver) listClaims(ctx context.Context, next string) (list resourceapi.ResourceClaimList, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.timing.request)
	defer cancel()
	request := d.rest.Get().MaxRetries(0).Resource("resourceclaims").Param("limit", strconv.Itoa(claimsPage))
	if next != "" {
		request.Param("continue", next)
	}
	err = request.Do(ctx).Into(&list)
	return list, err
}
