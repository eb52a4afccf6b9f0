package gpu

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
)

const (
	resource = "nvidia.com/gpu"
	replicas = 4
	profile  = `version: v1
sharing:
  timeSlicing:
    resources:
    - {name: nvidia.com/gpu, replicas: 4}
`
	patience = 5 * time.Minute
)

// TestServe runs the program between this machine's driver and a simulated kubelet: the GPUs are advertised
// in replicas, a pod gets one, and the program ends when it is told to.
func TestServe(t *testing.T) {
	virgate := program(t)
	gpus, err := nvml.Scan(open(t))
	must(t, err)
	whole := map[string]bool{}
	for _, gpu := range gpus {
		if !gpu.MIG && gpu.Health.Healthy() {
			whole[gpu.UUID] = true
		}
	}
	if len(whole) == 0 {
		t.Skip("no healthy GPU without MIG")
	}
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "profile.yaml"), []byte(profile), 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	kubelet := simkubelet.New(simkubelet.Options{
		Dir: filepath.Join(dir, "dp"), PodResourcesSocket: filepath.Join(dir, "pr.sock"), OnViolation: func(v string) { t.Error(v) },
	})
	must(t, kubelet.Start(ctx))
	defer func() { must(t, kubelet.Stop(context.WithoutCancel(ctx))) }()

	command := exec.Command(virgate, "run", "--node", "nvml", "--config", filepath.Join(dir, "profile.yaml"),
		"--device-plugin-dir", filepath.Join(dir, "dp"), "--pod-resources-socket", filepath.Join(dir, "pr.sock"),
		"--control-socket", filepath.Join(dir, "control.sock"), "--listen", "")
	log := &strings.Builder{}
	command.Stderr = log
	start := time.Now()
	must(t, command.Start())
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	if err := kubelet.Await(ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[resource].Allocatable == replicas*len(whole)
	}); err != nil {
		_ = command.Process.Kill()
		exit := <-ended
		t.Fatalf("%d devices of %d GPUs are not advertised: %v (%v)\n%s", replicas*len(whole), len(whole), err, exit, log)
	}
	note(t, "", "from the start until the kubelet has the devices", elapsed(start))

	status, err := kubelet.AddPod(ctx, simkubelet.Pod{
		Namespace: "default", Name: "pod",
		Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{resource: 1}}},
	})
	if err != nil {
		t.Errorf("a pod that wants a replica: %v", err)
	} else if visible := status.Containers[0].Env()["NVIDIA_VISIBLE_DEVICES"]; !whole[visible] {
		t.Errorf("NVIDIA_VISIBLE_DEVICES=%q, want one of %v", visible, whole)
	}

	start = time.Now()
	must(t, command.Process.Signal(syscall.SIGTERM))
	err = <-ended
	took := elapsed(start)
	note(t, "", "from SIGTERM to the end", took)
	if err != nil || strings.Contains(log.String(), "driver call abandoned") {
		t.Errorf("ended after %s with %v, want exit code 0 and no driver call abandoned\n%s", took, err, log)
	}
}
