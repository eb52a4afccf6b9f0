package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/test/repeat"
)

// testDRACases covers other uses of claims and of the old name: pods with several containers, a quota,
// another driver's DeviceClass with the same name, and many claims during an update.
func testDRACases(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	c.profiles(t, "dra-cases", map[string]string{"dra": replicas("16") + "dra: {resources: all}\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "dra")
	t.Cleanup(func() { c.uninstall(t) })
	settings := []string{"node=sim:h100x2", "config.name=dra-cases", "dra.enabled=true", "dra.resources={" + shared + "}", "--cdi-dir=/var/run/cdi"}
	c.upgrade(t, settings...)
	c.awaitSlices(t, "one one")
	for _, step := range []struct {
		name string
		play func(*testing.T)
	}{
		{"several containers by the old name", c.severalContainers},
		{"quota", c.claimQuota},
		{"foreign DeviceClass", c.foreignClass},
		{"claims in an update", func(t *testing.T) { c.claimsAtOnce(t, settings) }},
	} {
		began := time.Now()
		step.play(t)
		c.report.note("dra cases: "+step.name, took(began))
	}
	c.awaitSeries(t, c.plugin(t), "virgate_claims", "0")
}

// severalContainers runs a pod of four containers with shares by the old name: one that ends before
// the others start, a sidecar, and two more; one of these requests two GPUs.
func (c *cluster) severalContainers(t *testing.T) {
	t.Helper()
	of := func(name string, count int64) v1.Container {
		container := pod(name, shared, count).Spec.Containers[0]
		container.Name = name
		return container
	}
	first, sidecar := of("first", 1), of("sidecar", 1)
	first.Args = []string{"once"}
	sidecar.RestartPolicy = new(v1.ContainerRestartPolicyAlways)
	several := pod("several", shared, 1)
	several.Spec.InitContainers = []v1.Container{first, sidecar}
	several.Spec.Containers = []v1.Container{of("one", 1), of("two", 2)}
	c.run(t, several)
	for container, want := range map[string]int{"first": 1, "sidecar": 1, "one": 1, "two": 2} {
		if got := gpuNodesIn(c.printedBy(t, several.Name, container)); len(got) != want {
			t.Errorf("container %s has %q, want %d GPUs", container, got, want)
		}
	}
	c.remove(t, several.Name)
}

// claimQuota checks that a quota of the old name counts both claims and pods that request the name.
func (c *cluster) claimQuota(t *testing.T) {
	t.Helper()
	quotas := c.client.CoreV1().ResourceQuotas(workspace)
	name, limit := v1.ResourceName("requests."+shared), resource.MustParse("2")
	if _, err := quotas.Create(t.Context(), &v1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "gpus"}, Spec: v1.ResourceQuotaSpec{Hard: v1.ResourceList{name: limit}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	remove := func() { _ = quotas.Delete(context.WithoutCancel(t.Context()), "gpus", metav1.DeleteOptions{}) }
	t.Cleanup(remove)
	used := func(want int64) {
		c.await(t, fmt.Sprintf("the quota to count %d", want), func() error {
			quota, err := quotas.Get(t.Context(), "gpus", metav1.GetOptions{})
			if got, counted := quota.Status.Used[name]; err == nil && (!counted || got.CmpInt64(want) != 0) {
				err = fmt.Errorf("it counts %s", got.String())
			}
			return err
		})
	}
	used(0)
	c.runClaim(t, "quota-claim", "")
	c.run(t, pod("quota-name", shared, 1))
	used(2)
	for what, create := range map[string]func() error{
		"a pod by the old name": func() error {
			_, err := c.client.CoreV1().Pods(workspace).Create(t.Context(), pod("quota-pod", shared, 1), metav1.CreateOptions{})
			return err
		},
		"a claim": func() error {
			_, err := c.client.ResourceV1().ResourceClaims(workspace).Create(t.Context(), &resourceapi.ResourceClaim{
				ObjectMeta: metav1.ObjectMeta{Name: "quota-more"},
				Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
					{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: draClass}},
				}}},
			}, metav1.CreateOptions{})
			return err
		},
	} {
		if err := create(); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: gpus") {
			t.Errorf("beyond the quota, %s: %v", what, err)
		}
	}
	c.remove(t, "quota-claim")
	c.remove(t, "quota-name")
	remove()
}

// foreignClass has another driver's DeviceClass take the old name, as the newer of two classes does, and
// leave again. The scheduler then forgets the name; an update of the chart's class brings it back.
func (c *cluster) foreignClass(t *testing.T) {
	t.Helper()
	c.run(t, pod("before-class", shared, 1))
	before := c.podStates(t, []string{"before-class"})
	classes := c.client.ResourceV1().DeviceClasses()
	remove := func() {
		if err := classes.Delete(context.WithoutCancel(t.Context()), "foreign", metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	}
	if _, err := classes.Create(t.Context(), &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: "foreign"},
		Spec: resourceapi.DeviceClassSpec{
			ExtendedResourceName: new(shared),
			Selectors:            []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "gpu.example.com"`}}},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(remove)
	// The scheduler watches pods and classes separately, so it may see the pod before the class.
	c.await(t, "pod by-foreign-class to wait for a device", func() error {
		got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), "by-foreign-class", metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			c.create(t, pod("by-foreign-class", shared, 1))
			return errors.New("just created")
		case err != nil || unschedulable(got):
			return err
		case got.Spec.NodeName != "" && got.DeletionTimestamp == nil:
			err = c.client.CoreV1().Pods(workspace).Delete(t.Context(), got.Name, metav1.DeleteOptions{})
		}
		return errors.Join(err, fmt.Errorf("it is %s on node %q", got.Status.Phase, got.Spec.NodeName))
	})
	c.runClaim(t, "beside-foreign-class", "") // Claims name their class.
	c.undisturbed(t, before)
	remove()
	if _, err := classes.Patch(t.Context(), draClass, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"touched":%q}}}`, time.Now()), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	c.awaitPhase(t, "by-foreign-class", v1.PodRunning)
	c.remove(t, "before-class", "by-foreign-class", "beside-foreign-class")
}

// claimsAtOnce creates many pods with claims at once while another version of Virgate takes over.
func (c *cluster) claimsAtOnce(t *testing.T, settings []string) {
	t.Helper()
	c.claimTemplate(t, "update", "true")
	old := c.plugin(t)
	names := make([]string, repeat.Times(12, 30))
	for i := range names {
		names[i] = fmt.Sprint("update-", i)
		c.create(t, claimPod(names[i], "update"))
	}
	c.upgrade(t, append(slices.Clone(settings), "image.tag="+nextVersion)...)
	given := map[string]int{}
	for _, name := range names {
		c.awaitPhase(t, name, v1.PodRunning)
		given[strings.Join(c.gpuNodes(t, name), " ")]++
	}
	for gpu, shares := range given {
		if gpu == "" || shares > 16 {
			t.Errorf("%d pods have %q, of 16 shares", shares, gpu)
		}
	}
	if after := c.plugin(t); after.UID == old.UID {
		t.Error("no other version took over")
	}
	c.remove(t, names...)
}

// testDRAReboot simulates a reboot under pods that have partitions made for their claims: the processes, the
// partitions and the contents of /run are gone. Virgate makes each pod's partition again.
func testDRAReboot(t *testing.T, c *cluster) {
	c.expectRestarts(t)
	const small, large = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
	c.createNamespace(t, namespace)
	c.profiles(t, "reboot", map[string]string{"ondemand": "version: v1\nflags: {migStrategy: mixed}\nmig: {manage: true}\ndra: {resources: all, dynamicMIG: true}\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "ondemand")
	t.Cleanup(func() { c.uninstall(t) })
	c.upgrade(t, "node=sim:h100", "config.name=reboot", "mig.manage=true", "dra.enabled=true", "dra.resources={"+small+","+large+"}", "--cdi-dir=/var/run/cdi")
	var names []string
	for name, resourceName := range map[string]string{"small-1": small, "small-2": small, "large": large} {
		lasting := pod(name, resourceName, 1)
		lasting.Spec.RestartPolicy = v1.RestartPolicyAlways
		c.run(t, lasting)
		names = append(names, name)
	}
	devices := map[string]string{}
	for _, name := range names {
		devices[name] = c.claimedDevice(t, name)
	}
	before := c.podStates(t, names)

	c.kubelet.stop(syscall.SIGKILL)
	c.killContainers(t)
	specs, err := filepath.Glob("/var/run/cdi/*")
	if err != nil || len(specs) == 0 {
		t.Errorf("CDI specs %q: %v", specs, err)
	}
	for _, spec := range specs {
		if err := os.Remove(spec); err != nil {
			t.Error(err)
		}
	}
	began := time.Now()
	c.kubelet.start(t)
	for _, name := range names {
		c.await(t, name+" to run again", func() error {
			status := c.awaitPhase(t, name, v1.PodRunning).Status.ContainerStatuses[0]
			if status.ContainerID == before[name].Container || status.State.Running == nil {
				return fmt.Errorf("it is %v", status.State)
			}
			return nil
		})
		if again := c.claimedDevice(t, name); again != devices[name] {
			t.Errorf("%s has %s after the reboot, and had %s", name, again, devices[name])
		}
	}
	c.report.note("dra reboot: kubelet's start to all pods with partitions", took(began))
	c.run(t, pod("after-reboot", small, 1))
	c.remove(t, append(names, "after-reboot")...)
	c.awaitSeries(t, c.plugin(t), "virgate_claims", "0")
}

// claimedDevice returns the device of the claim that was made for the pod.
func (c *cluster) claimedDevice(t *testing.T, name string) (device string) {
	t.Helper()
	got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got.Status.ExtendedResourceClaimStatus == nil {
		t.Fatalf("pod %s has no claim: %v", name, got.Status)
	}
	claim, err := c.client.ResourceV1().ResourceClaims(workspace).Get(t.Context(), got.Status.ExtendedResourceClaimStatus.ResourceClaimName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return claim.Status.Allocation.Devices.Results[0].Device
}

// killContainers kills every process of the cluster's containers and sandboxes.
func (c *cluster) killContainers(t *testing.T) {
	t.Helper()
	c.await(t, "no process in a container", func() error {
		files, err := filepath.Glob("/proc/[0-9]*/cgroup")
		left := 0
		for _, file := range files {
			groups, readErr := os.ReadFile(file)
			if readErr != nil || !strings.Contains(string(groups), "/"+filepath.Base(c.work)+"/kubepods") {
				continue
			}
			id, numberErr := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if numberErr != nil {
				return numberErr
			}
			left++
			_ = syscall.Kill(id, syscall.SIGKILL)
		}
		if err == nil && left > 0 {
			err = fmt.Errorf("%d", left)
		}
		return err
	})
}
