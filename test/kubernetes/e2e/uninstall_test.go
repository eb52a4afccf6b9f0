package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

// testUninstall takes the chart away while pods hold shares, and brings it back.
func testUninstall(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2")
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	holders := c.hold(t, "holder", 3)
	before, plugin := c.vitals(t, holders), c.plugin(t)
	if running := processes(t, plugin); len(running) != 1 {
		t.Fatalf("Virgate's container has processes %v, want one", running)
	}

	began := time.Now()
	c.uninstall(t)
	c.awaitAllocatable(t, map[string]int64{})
	c.report.note("helm uninstall to allocatable 0", time.Since(began).Round(10*time.Millisecond).String())
	c.awaitServed(t, map[string]int64{})
	c.nothingLeft(t, plugin)
	c.create(t, pod("nowhere", shared, 1))
	c.awaitUnscheduled(t, "nowhere", "Insufficient "+shared)
	c.undisturbed(t, before)

	c.install(t, "node=sim:t4x2")
	c.awaitAllocatable(t, all)
	c.undisturbed(t, before)
	c.fill(t, append(holders, "nowhere"), 2, 4)
}

// nothingLeft fails if of Virgate, which ran in that pod, there is a process, a
// socket or an object in the cluster.
func (c *cluster) nothingLeft(t *testing.T, plugin *v1.Pod) {
	t.Helper()
	if left := processes(t, plugin); len(left) > 0 {
		t.Errorf("Virgate's processes %v run on", left)
	}
	err := filepath.WalkDir("/var/lib/kubelet/device-plugins", func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && entry.Type() == fs.ModeSocket && entry.Name() != "kubelet.sock" {
			t.Errorf("the socket %s is left", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	c.await(t, time.Minute, "the chart's objects to be gone", func() error {
		if left := c.named(t, "virgate"); len(left) > 0 {
			return fmt.Errorf("there are %q", left)
		}
		return nil
	})
}

// named are the objects of all kinds whose names begin so, as "RESOURCE/NAME", but
// for namespaces, which Helm leaves, and events, which stay for an hour.
func (c *cluster) named(t *testing.T, prefix string) []string {
	t.Helper()
	client, err := dynamic.NewForConfig(c.config)
	if err != nil {
		t.Fatal(err)
	}
	groups, err := c.client.Discovery().ServerPreferredResources()
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, group := range groups {
		version, err := schema.ParseGroupVersion(group.GroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range group.APIResources {
			if !slices.Contains(kind.Verbs, "list") || kind.Name == "namespaces" || kind.Name == "events" {
				continue
			}
			list, err := client.Resource(version.WithResource(kind.Name)).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatalf("list %s: %v", kind.Name, err)
			}
			for _, object := range list.Items {
				if strings.HasPrefix(object.GetName(), prefix) {
					found = append(found, kind.Name+"/"+object.GetName())
				}
			}
		}
	}
	return found
}
