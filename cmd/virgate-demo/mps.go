package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simmps"
	"github.com/virgate/virgate/sharing"
)

// sharedByMPS allows containers several shares of a GPU.
const sharedByMPS = `version: v1
sharing:
  mps:
    failRequestsGreaterThanOne: false
    resources:
    - name: nvidia.com/gpu
      replicas: 4
`

// runMPS runs virgate mps with simulated daemons.
func (s *demoNode) runMPS(ctx context.Context, log *slog.Logger) error {
	// The users of MPS servers must be able to enter it.
	//nolint:gosec // see above
	if err := errors.Join(os.Chmod(filepath.Dir(s.mps), 0o711), os.MkdirAll(s.mps, 0o755)); err != nil {
		return err
	}
	node := nvml.NewNode(s.node, nvml.Options{Logger: log})
	return mps.Run(ctx, mps.Options{
		Root:    s.mps,
		Logger:  log.With("component", "mps"),
		Control: &simmps.InProcess{Servers: s.node.MPS()},
		ComputeMode: func(ctx context.Context, gpu string) (sharing.ComputeMode, error) {
			mode, _, err := node.ComputeMode(ctx, gpu)
			return mode, err
		},
		SetComputeMode: node.SetComputeMode,
		Timing: mps.Timing{
			Ask:      200 * time.Millisecond,
			Pause:    200 * time.Millisecond,
			MaxPause: 500 * time.Millisecond,
		},
	})
}

// mpsSteps share two GPUs by time slices, by MPS and not at all.
func (s *demoNode) mpsSteps() []step {
	return []step{
		{"The node: two T4s in four time slices each, and a pod that has one", func(ctx context.Context) error {
			if err := s.allocatable(ctx, 8, "the kubelet lists 8 devices"); err != nil {
				return err
			}
			_, err := s.kubelet.AddPod(ctx, podOf("demo", "notebook", gpuResource, 1))
			return err
		}},
		{"The profile asks for MPS", func(ctx context.Context) error {
			return s.runByMPS(ctx, 4, "the free GPU has its daemon: 4 shares by MPS; the other one waits for its pod")
		}},
		{"The pod with the time slice ends", func(ctx context.Context) error {
			if err := s.kubelet.DeletePod("demo", "notebook"); err != nil {
				return err
			}
			return s.allocatable(ctx, 8, "both GPUs are shared by MPS: allocatable 8")
		}},
		{"The daemon of the pods' GPU dies, and is healed", s.killMPSDaemon},
		{"Every GPU whole again", func(ctx context.Context) error {
			err := s.switchTo(ctx, "version: v1\n", 1, "the free GPU is whole, its daemon has ended")
			if err != nil {
				return err
			}
			for _, pod := range []string{"inference", "training"} {
				if err := s.kubelet.DeletePod("demo", pod); err != nil {
					return err
				}
			}
			if err := s.allocatable(ctx, 2, "the other one when its pods have ended"); err != nil {
				return err
			}
			node := nvml.NewNode(s.node, nvml.Options{Logger: slog.New(slog.DiscardHandler)})
			for _, gpu := range s.gpus {
				mode, _, err := node.ComputeMode(ctx, gpu.UUID)
				s.check(err == nil && mode == sharing.DefaultComputeMode, "GPU %d has its compute mode back: %s",
					gpu.Index, mode)
			}
			return nil
		}},
		{"What the kubelet thinks of it", s.showVerdict},
	}
}

// switchTo replaces the profile and waits as allocatable does.
func (s *demoNode) switchTo(ctx context.Context, profile string, count int, message string) error {
	if err := s.replace([]byte(profile)); err != nil {
		return err
	}
	return s.allocatable(ctx, count, message)
}

// allocatable waits until the kubelet may allocate count devices, including those held.
func (s *demoNode) allocatable(ctx context.Context, count int, message string) error {
	start := time.Now()
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Allocatable == count })
	s.check(came, "%s (%d ms)", message, time.Since(start).Milliseconds())
	return err
}

// runMPSPod starts a pod with this number of shares of one GPU, and prints its limits.
func (s *demoNode) runMPSPod(ctx context.Context, name string, shares int, percentage string) error {
	status, err := s.kubelet.AddPod(ctx, podOf("demo", name, gpuResource, shares))
	if err != nil {
		s.check(false, "pod %s runs: %v", name, err)
		return ctx.Err()
	}
	env := status.Containers[0].Env()
	s.say("   pod %-9s  CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=%s", name, env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"])
	got := env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
	s.check(got == percentage, "%d of 4 shares: %s %% of the multiprocessors", shares, got)
	s.mpsGPU = env["NVIDIA_VISIBLE_DEVICES"]
	return nil
}

// killMPSDaemon kills a daemon, and for a while also each daemon that is started in its place.
func (s *demoNode) killMPSDaemon(ctx context.Context) error {
	fault := filepath.Join(s.mps, s.mpsGPU, "log", "fault")
	if err := os.WriteFile(fault, []byte("die"), 0o600); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	if err := s.allocatable(ctx, 4, "its 4 devices are Unhealthy, those of the other GPU are not"); err != nil {
		return err
	}
	if err := os.Remove(fault); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	return s.allocatable(ctx, 8, "the daemon was started again, and all are back")
}

// serveMPS leaves two pods running that share a GPU by MPS.
func (s *demoNode) serveMPS(ctx context.Context) error { return s.runByMPS(ctx, 8, "shared by MPS") }

// runByMPS switches to MPS, waits until count devices are allocatable, and starts two pods.
func (s *demoNode) runByMPS(ctx context.Context, count int, message string) error {
	if err := s.switchTo(ctx, sharedByMPS, count, message); err != nil {
		return err
	}
	if err := s.runMPSPod(ctx, "inference", 1, "25"); err != nil {
		return err
	}
	return s.runMPSPod(ctx, "training", 2, "50")
}
