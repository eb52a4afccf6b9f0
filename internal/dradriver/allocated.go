package dradriver

import (
	"context"
	"fmt"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
)

// claimsPage is how many claims one list has.
const claimsPage = 500

// Allocated are the names of this node's devices that claims of the whole cluster have been given,
// by the claim's UID, however far the kubelet is with them.
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
