package e2e

import (
	"context"
	"errors"
	"net/http"
	"os"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// cluster is the Kubernetes of one node, with what has been installed on it.
type cluster struct {
	work, tools string
	config      *rest.Config
	client      *kubernetes.Clientset

	apiServer, containerd, kubelet *component

	report *report
}

// errNotYet is a condition that does not hold and has nothing to say.
var errNotYet = errors.New("not yet")

// startCluster starts all of it and stops it at the end of the test.
func startCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{work: os.Getenv(workFolder), tools: os.Getenv(toolsFolder), report: &report{started: time.Now()}}
	c.report.step("control plane", func() { c.startControlPlane(t) })
	if version, err := c.client.ServerVersion(); err != nil || version.Major != "1" {
		t.Fatalf("version %v, %v: run by make e2e, which says which it is", version, err)
	}
	c.report.step("node ready", func() { c.startNode(t) })
	return c
}

// ready says why the API server is not, the first time also making the client.
func (c *cluster) ready() error {
	if c.client == nil {
		config, err := clientcmd.BuildConfigFromFlags("", c.path("admin.conf"))
		if err != nil {
			return err
		}
		config.QPS = -1
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return err // Its certificate is not written yet.
		}
		c.config, c.client = config, client
	}
	var code int
	if err := c.client.RESTClient().Get().AbsPath("/readyz").Do(context.Background()).StatusCode(&code).Error(); err != nil {
		return err
	}
	if code != http.StatusOK {
		return errNotYet
	}
	return nil
}

// await waits until the condition has no complaint.
func (c *cluster) await(t *testing.T, limit time.Duration, what string, condition func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := condition()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("waited %s for %s: %v", limit, what, err)
		case <-tick.C:
		}
	}
}
