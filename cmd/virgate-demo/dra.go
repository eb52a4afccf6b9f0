package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/simdra"
	"github.com/virgate/virgate/internal/simkubelet"
)

// demoDRA has the parts that claims require in addition to the node.
type demoDRA struct {
	api     *simdra.API
	options *dradriver.Options
	kubelet *simdra.Kubelet
	// claims maps names to the pods' claims.
	claims map[string]*resourceapi.ResourceClaim
}

// demoNodeName is the name of the Node.
const demoNodeName = "demo"

// newDemoDRA starts an API server that runs until ctx ends.
func newDemoDRA(ctx context.Context, dir string, log *slog.Logger) (*demoDRA, error) {
	api, err := simdra.NewAPI(ctx, dra.DriverName, demoNodeName, func(format string, arguments ...any) {
		log.Error("the API server is asked what no driver should ask", "request", fmt.Sprintf(format, arguments...))
	})
	if err != nil {
		return nil, err
	}
	registry := filepath.Join(dir, "registry")
	if err := os.Mkdir(registry, 0o700); err != nil {
		return nil, err
	}
	return &demoDRA{
		api:    api,
		claims: map[string]*resourceapi.ResourceClaim{},
		options: &dradriver.Options{
			Driver:      dra.DriverName,
			Dir:         filepath.Join(dir, "plugins"),
			RegistryDir: registry,
			Config:      api.Config(),
		},
	}, nil
}

// These are the profiles of the DRA scenario. Without dra the device plugin has the same resources.
const (
	draFlags4 = "version: v1\nflags: {migStrategy: mixed}\n"
	byPlugin  = draFlags4 +
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\nmig: {manage: true, config: " +
		"all-disabled}\n"
	byClaims    = byPlugin + "dra: {resources: all}\n"
	onDemand    = draFlags4 + "mig: {manage: true}\ndra: {resources: all, dynamicMIG: true}\n"
	smallOfH100 = "1g.10gb"
)

// draSteps switch the same node from the device plugin to claims, then to partitions on demand, and
// back to the device plugin.
func (s *demoNode) draSteps() []step {
	return []step{
		{"The node: two H100s in four time slices each, by the device plugin, and a pod that has one",
			func(ctx context.Context) (err error) {
				s.dra.kubelet, err = simdra.Register(ctx, s.dra.options.RegistryDir)
				if err != nil {
					return err
				}
				if err := s.allocatable(ctx, 8, "the kubelet lists 8 devices"); err != nil {
					return err
				}
				_, err = s.kubelet.AddPod(ctx, podOf("demo", "notebook", gpuResource, 1))
				return err
			}},
		{"The profile says dra: {resources: all}", func(ctx context.Context) error {
			if err := s.replace([]byte(byClaims)); err != nil {
				return err
			}
			if err := s.offered(ctx, "the free GPU is in a ResourceSlice; the other one waits for its pod", 1,
				0); err != nil {
				return err
			}
			return s.allocatable(ctx, 0, "the device plugin gives nothing of the name any more: allocatable 0")
		}},
		{"Pods with claims: one share, and two shares with 16Gi", func(ctx context.Context) error {
			s.runByClaim(ctx, "inference", simdra.Request{Resource: gpuResource})
			s.runByClaim(ctx, "training", simdra.Request{
				Resource: gpuResource,
				Capacity: capacity("shares", "2", "memory", "16Gi"),
			})
			_, err := s.dra.api.Allocate("greedy",
				simdra.Request{Resource: gpuResource, Capacity: capacity("shares", "2")})
			s.check(errors.Is(err, simdra.ErrUnschedulable), "a claim for two more shares waits: one is left")
			return nil
		}},
		{"The device plugin's pod ends", func(ctx context.Context) error {
			if err := s.kubelet.DeletePod("demo", "notebook"); err != nil {
				return err
			}
			if err := s.offered(ctx, "its GPU follows", 2, 0); err != nil {
				return err
			}
			s.runByClaim(ctx, "both", simdra.Request{Resource: gpuResource, Count: 2})
			return nil
		}},
		{"GPU 1 falls off the bus (XID 79), and comes back", func(ctx context.Context) error {
			if err := s.node.Do("xid", map[string]string{"gpu": "1", "code": "79"}); err != nil {
				return err
			}
			if err := s.offered(ctx, "its device has a taint, the other one has not", 2, 1); err != nil {
				return err
			}
			if err := s.node.Do("heal", map[string]string{"gpu": "1"}); err != nil {
				return err
			}
			return s.offered(ctx, "after a reset the taint is gone", 2, 0)
		}},
		{"The pods end, and the profile asks for partitions on demand", s.makeOnDemand},
		{"Back to the device plugin", func(ctx context.Context) error {
			err := s.switchTo(ctx, byPlugin, 4,
				"the free GPU is the device plugin's again; the other one waits for its pods")
			if err != nil {
				return err
			}
			if err := s.endByClaim(ctx, "small-1", "small-2"); err != nil {
				return err
			}
			return s.allocatable(ctx, 8, "MIG mode is off, and 8 devices are listed as before")
		}},
		{"What the kubelet thinks of it", func(ctx context.Context) error {
			_ = s.dra.kubelet.Close()
			return s.showVerdict(ctx)
		}},
	}
}

// makeOnDemand gives two pods partitions that did not exist before.
func (s *demoNode) makeOnDemand(ctx context.Context) error {
	if err := s.endByClaim(ctx, "inference", "training", "both"); err != nil {
		return err
	}
	if err := s.replace([]byte(onDemand)); err != nil {
		return err
	}
	start := time.Now()
	came, err := s.awaitDevices(ctx, func(devices []resourceapi.Device) bool {
		return slices.ContainsFunc(devices,
			func(d resourceapi.Device) bool { return strings.Contains(d.Name, "1g10gb") })
	})
	if err != nil {
		return err
	}
	s.check(came, "every place of every MIG profile is in the ResourceSlices, beside the whole GPUs (%d ms)",
		time.Since(start).Milliseconds())
	for _, pod := range []string{"small-1", "small-2"} {
		s.runByClaim(ctx, pod, simdra.Request{Profile: smallOfH100})
	}
	return s.draw(ctx)
}

// capacity returns a map from pairs of name and quantity.
func capacity(pairs ...string) map[resourceapi.QualifiedName]resource.Quantity {
	all := map[resourceapi.QualifiedName]resource.Quantity{}
	for pair := range slices.Chunk(pairs, 2) {
		all[resourceapi.QualifiedName(pair[0])] = resource.MustParse(pair[1])
	}
	return all
}

// awaitDevices waits for the wanted devices in the ResourceSlices, and reports whether they
// appeared.
func (s *demoNode) awaitDevices(ctx context.Context, wanted func([]resourceapi.Device) bool) (bool, error) {
	limit, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := s.dra.api.Until(limit, func() bool {
		var devices []resourceapi.Device
		for _, slice := range s.dra.api.Sorted() {
			devices = append(devices, slice.Spec.Devices...)
		}
		return wanted(devices)
	})
	return err == nil, ctx.Err()
}

// offered waits until count devices are offered and tainted of them have a taint.
func (s *demoNode) offered(ctx context.Context, message string, count, tainted int) error {
	start := time.Now()
	came, err := s.awaitDevices(ctx, func(devices []resourceapi.Device) bool {
		bad := slices.DeleteFunc(slices.Clone(devices), func(d resourceapi.Device) bool { return len(d.Taints) == 0 })
		return len(devices) == count && len(bad) == tainted
	})
	s.check(came, "%s (%d ms)", message, time.Since(start).Milliseconds())
	return err
}

// runByClaim creates a claim, lets it be allocated and prepared, and runs a pod with it.
func (s *demoNode) runByClaim(ctx context.Context, pod string, request simdra.Request) {
	start := time.Now()
	claim, err := s.dra.api.Allocate(pod, request)
	if err != nil {
		s.check(false, "pod %s: %v", pod, err)
		return
	}
	s.dra.claims[pod] = claim
	devices, err := s.dra.kubelet.Prepare(ctx, claim)
	if err != nil {
		s.check(false, "pod %s: %v", pod, err)
		return
	}
	given := simkubelet.Claim{Name: claim.Name}
	for _, d := range devices {
		given.Devices = append(given.Devices, simkubelet.ClaimDevice{
			Driver: dra.DriverName,
			Pool:   d.GetPoolName(),
			Name:   d.GetDeviceName(),
			CDI:    d.GetCdiDeviceIds(),
		})
		s.say("   pod %-9s  has %s, CDI %s", pod, d.GetDeviceName(), strings.Join(d.GetCdiDeviceIds(), " "))
	}
	_, err = s.kubelet.AddPod(ctx, simkubelet.Pod{
		Namespace:  claim.Namespace,
		Name:       pod,
		Containers: []simkubelet.Container{{Name: "main", Claims: []simkubelet.Claim{given}}},
	})
	s.check(err == nil && len(devices) == max(request.Count, 1), "it runs, %d ms after its claim was made",
		time.Since(start).Milliseconds())
}

// endByClaim ends pods and deletes their claims.
func (s *demoNode) endByClaim(ctx context.Context, pods ...string) error {
	for _, pod := range pods {
		claim := s.dra.claims[pod]
		if claim == nil {
			continue // Already reported.
		}
		if err := s.kubelet.DeletePod(claim.Namespace, pod); err != nil {
			return err
		}
		if err := s.dra.kubelet.Unprepare(ctx, claim); err != nil {
			return err
		}
		s.dra.api.Release(claim)
	}
	return nil
}
