package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// runtimeSocket is where the kubelet finds containerd.
const runtimeSocket = "/run/containerd/containerd.sock"

// startNode starts containerd with the images, and the kubelet.
func (c *cluster) startNode(t *testing.T) {
	t.Helper()
	c.write(t, "containerd.toml", `version = 3
root = '`+c.path("containerd")+`'
state = '/run/containerd'
[grpc]
address = '`+runtimeSocket+`'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '`+workloadImage+`'
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['`+c.tools+`']
conf_dir = '`+c.path("cni")+`'
`)
	c.write(t, "cni/10-pods.conflist", `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods0", "isGateway": true,
"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.78.0.0/20"}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "/run/cni"}}]}`)
	c.containerd = c.component(t, "containerd", func() *exec.Cmd {
		command := exec.Command(filepath.Join(c.tools, "containerd"), "--config", c.path("containerd.toml"))
		command.Env = append(os.Environ(), "PATH="+c.tools+":"+os.Getenv("PATH"))
		return command
	})
	c.await(t, time.Minute, "containerd", func() error {
		return exec.Command(filepath.Join(c.tools, "ctr"), "--address", runtimeSocket, "version").Run()
	})
	for _, image := range images() {
		importing := exec.Command(filepath.Join(c.tools, "ctr"), "--address", runtimeSocket, "--namespace", "k8s.io", "images", "import", c.path(image.file))
		if output, err := importing.CombinedOutput(); err != nil {
			t.Fatalf("import %s: %v\n%s", image.file, err, output)
		}
	}
	c.write(t, "kubelet.yaml", `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://`+runtimeSocket+`
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /`+filepath.Base(c.work)+`
enforceNodeAllocatable: []
failSwapOn: false
resolvConf: ""
volumePluginDir: /var/lib/kubelet/volume-plugins
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
nodeStatusUpdateFrequency: 1s
syncFrequency: 10s
maxPods: 500
podsPerCore: 0
kubeAPIQPS: 200
kubeAPIBurst: 400
eventRecordQPS: 0
evictionHard: {memory.available: 50Mi}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
`)
	c.kubelet = c.kubernetes(t, "kubelet",
		"--config="+c.path("kubelet.yaml"), "--kubeconfig="+c.path("node.conf"), "--hostname-override="+hostName,
		"--node-ip="+nodeAddress, "--cert-dir="+c.path("kubelet"),
		// What the chart's affinity asks for; node feature discovery sets it elsewhere.
		"--node-labels=nvidia.com/gpu.present=true",
	)
	c.await(t, 2*time.Minute, "the node to be ready", func() error {
		node, err := c.client.CoreV1().Nodes().Get(t.Context(), hostName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range node.Status.Conditions {
			if condition.Type == v1.NodeReady && condition.Status == v1.ConditionTrue {
				return nil
			}
		}
		return errNotYet
	})
}

// removePods ends all pods, for their mounts must not outlive the kubelet.
func (c *cluster) removePods(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	namespaces, err := c.client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Log(err)
		return
	}
	now := int64(0)
	for _, namespace := range namespaces.Items {
		_ = c.client.CoreV1().Pods(namespace.Name).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
	}
}
