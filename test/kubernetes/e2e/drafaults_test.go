package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/test/await"
)

// testDRAFaults breaks what claims depend on, one after the other: a GPU, the API server, the kubelet,
// Virgate, the Node object, and the order in which a device changes hands. Running pods must not notice,
// and the next ones must start.
func testDRAFaults(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	whole := "version: v1\ndra: {resources: all}\n"
	c.profiles(t, "dra-faults", map[string]string{"plugin": replicas("4"), "dra": replicas("4") + "dra: {resources: all}\n", "whole": whole})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "dra")
	t.Cleanup(func() { c.uninstall(t) })
	settings := []string{"node=sim:h100x2", "config.name=dra-faults", "dra.enabled=true", "dra.resources={" + shared + "}", "--cdi-dir=/var/run/cdi", "--probe=2s"}
	c.upgrade(t, settings...) // Not install: the plugin has nothing to list.
	devices := c.awaitSlices(t, "one one")
	c.claimTemplate(t, "faults-share", sharedBy("time-slicing"))

	c.runClaim(t, "faults-claim", "")
	c.run(t, pod("faults-name", shared, 1))
	lasting := claimPod("faults-lasting", "faults-share")
	lasting.Spec.RestartPolicy = v1.RestartPolicyAlways
	c.run(t, lasting)
	before := c.podStates(t, []string{"faults-claim", "faults-name", lasting.Name})

	for _, step := range []struct {
		name string
		play func(*testing.T, map[string]podState)
	}{
		{"other number of shares", c.otherShares},
		{"faulty GPU", c.faultyGPU},
		{"API server away", c.claimsWithoutAPI},
		{"kubelet killed", c.claimsWithoutKubelet},
		{"rolling update", func(t *testing.T, _ map[string]podState) { c.claimsInUpdate(t, settings) }},
		{"Node made anew", c.nodeAgain},
	} {
		began := time.Now()
		step.play(t, before)
		c.undisturbed(t, before)
		c.report.note("dra faults: "+step.name, took(began))
	}
	c.restart(t, lasting.Name)
	if again := c.gpuNodes(t, lasting.Name); !slices.Equal(again, c.gpuNodes(t, "faults-claim")) {
		t.Errorf("a container that started again has %q", again)
	}
	c.remove(t, slices.Collect(maps.Keys(before))...)
	c.forcedDeletion(t)
	c.lateClaim(t, devices[0])
}

// otherShares offers fewer shares than are held, then more: each holder keeps its share, and no pod gets
// one beyond the number.
func (c *cluster) otherShares(t *testing.T, holders map[string]podState) {
	t.Helper()
	byDRA := "dra: {resources: all}\n"
	of := func(number int) string { // A selector, so that the scheduler goes by the slices with that number.
		return fmt.Sprintf("device.capacity[%q].shares.compareTo(quantity(%q)) == 0", draDriver, fmt.Sprint(number))
	}
	c.editProfile(t, "dra-faults", "dra", replicas("2")+byDRA)
	for _, name := range []string{"of-two-1", "of-two-2"} {
		c.runClaim(t, name, of(2))
		if a, b := c.gpuNodes(t, name), c.gpuNodes(t, "faults-claim"); slices.Equal(a, b) {
			t.Errorf("%s has %q, of which %d shares are held and 2 offered", name, a, len(holders))
		}
	}
	c.createClaim(t, "of-two-3", of(2), 1)
	c.awaitUnschedulable(t, "of-two-3")
	c.editProfile(t, "dra-faults", "dra", replicas("10")+byDRA)
	c.runClaim(t, "of-ten", of(10))
	c.remove(t, "of-two-1", "of-two-2", "of-two-3", "of-ten")
	c.editProfile(t, "dra-faults", "dra", replicas("4")+byDRA)
	c.runClaim(t, "of-four", of(4))
	c.remove(t, "of-four")
}

// faultyGPU has a GPU with holders fail and recover. The fault costs one write, and the status of pods with
// claims gives the reason; the kubelet gives none for pods by the old name.
func (c *cluster) faultyGPU(t *testing.T, _ map[string]podState) {
	t.Helper()
	plugin, writes := c.plugin(t), c.sliceWrites(t)
	claim, err := c.client.ResourceV1().ResourceClaims(workspace).Get(t.Context(), "faults-claim", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	uuid := strings.TrimSuffix(strings.TrimPrefix(claim.Status.Allocation.Devices.Results[0].Device, "gpu-"), "-ts")
	index := indexOf(t, plugin, "GPU-"+uuid)
	c.simulate(t, plugin, "xid", "--gpu", index, "79")
	c.awaitSlices(t, "fault one")
	c.awaitClaimHealth(t, []string{"faults-claim", "faults-lasting"}, v1.ResourceHealthStatusUnhealthy, "XID 79")
	for uid := range writes {
		writes[uid]++
	}
	if after := c.sliceWrites(t); !maps.Equal(writes, after) {
		t.Errorf("with one write for the fault the generations are %v, not %v", writes, after)
	}
	c.runClaim(t, "beside-fault", "")
	if got := c.gpuNodes(t, "beside-fault"); slices.Equal(got, c.gpuNodes(t, "faults-claim")) {
		t.Errorf("a pod that came after the fault has %q", got)
	}
	c.simulate(t, plugin, "heal", "--gpu", index)
	c.awaitSlices(t, "one one")
	c.awaitClaimHealth(t, []string{"faults-claim", "faults-lasting"}, v1.ResourceHealthStatusHealthy, "")
	c.remove(t, "beside-fault")
}

// claimsWithoutAPI has a GPU fail and recover while the API server is away.
func (c *cluster) claimsWithoutAPI(t *testing.T, _ map[string]podState) {
	t.Helper()
	plugin := c.plugin(t)
	c.apiServer.stop(syscall.SIGKILL)
	c.simulate(t, plugin, "xid", "--gpu", "1", "79")
	c.awaitSeries(t, plugin, "virgate_unit_health_state", "1", `state="unhealthy"`)
	c.answers(t, plugin)
	c.apiServer.start(t)
	c.await(t, "the API server", c.ready)
	c.awaitSlices(t, "fault one")
	c.simulate(t, plugin, "heal", "--gpu", "1")
	c.awaitSlices(t, "one one")
	c.runClaim(t, "after-api", "")
	c.remove(t, "after-api")
}

// claimsWithoutKubelet kills the kubelet. While it is away, one pod is created and another deleted.
func (c *cluster) claimsWithoutKubelet(t *testing.T, _ map[string]podState) {
	t.Helper()
	c.runClaim(t, "leaves-meanwhile", "")
	c.kubelet.stop(syscall.SIGKILL)
	if err := c.client.CoreV1().Pods(workspace).Delete(t.Context(), "leaves-meanwhile", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.createClaim(t, "comes-meanwhile", "", 1)
	uids := c.sliceUIDs(t)
	began := time.Now()
	c.kubelet.start(t)
	c.await(t, "other slices than before", func() error {
		now := c.sliceUIDs(t)
		if len(now) == 0 || slices.ContainsFunc(now, func(uid types.UID) bool { return slices.Contains(uids, uid) }) {
			return fmt.Errorf("they are %q", now)
		}
		return nil
	})
	c.report.note("dra faults: kubelet's start to its wipe and slices again", took(began))
	c.awaitSlices(t, "one one")
	c.awaitPhase(t, "comes-meanwhile", v1.PodRunning)
	c.remove(t, "leaves-meanwhile")
	c.remove(t, "comes-meanwhile")
}

// claimsInUpdate starts one pod after the other while another version takes over and back, and Virgate is
// killed. Each pod runs, and the slices stay as they are.
func (c *cluster) claimsInUpdate(t *testing.T, settings []string) {
	t.Helper()
	before := c.sliceWrites(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var busy sync.WaitGroup
	var count int
	var failed error
	busy.Go(func() { count, failed = c.claimsInTurn(ctx, "faults-share") })
	for _, tag := range []string{nextVersion, version} {
		c.upgrade(t, append(slices.Clone(settings), "image.tag="+tag)...)
	}
	c.expectRestarts(t)
	if err := syscall.Kill(processes(t, c.plugin(t))[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	cancel()
	busy.Wait()
	if failed != nil || count == 0 {
		t.Errorf("%d pods with claims ran during updates: %v", count, failed)
	}
	if after := c.sliceWrites(t); !maps.Equal(before, after) {
		t.Errorf("slices and their generations went from %v to %v", before, after)
	}
	c.report.note("dra faults: pods with claims that came and went in two updates and a kill", fmt.Sprint(count))
}

// claimsInTurn runs one pod after the other until the context ends, and waits for the last one.
func (c *cluster) claimsInTurn(ctx context.Context, template string) (count int, err error) {
	pods := c.client.CoreV1().Pods(workspace)
	background, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*await.Patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for ; ctx.Err() == nil; count++ {
		name := fmt.Sprintf("in-turn-%d", count)
		if _, err := pods.Create(background, claimPod(name, template), metav1.CreateOptions{}); err != nil {
			return count, err
		}
		for ran := false; ; {
			got, err := pods.Get(background, name, metav1.GetOptions{})
			switch {
			case ran && apierrors.IsNotFound(err):
			case err != nil:
				return count, fmt.Errorf("%s: %w", name, err)
			case got.Status.Phase == v1.PodFailed && !ran:
				return count, fmt.Errorf("%s: %s: %s", name, got.Status.Reason, got.Status.Message)
			case got.Status.Phase == v1.PodRunning && !ran:
				ran = true
				err = pods.Delete(background, name, metav1.DeleteOptions{})
			}
			if err != nil && !apierrors.IsNotFound(err) {
				return count, err
			} else if err != nil {
				break
			}
			<-tick.C
		}
	}
	return count, nil
}

// nodeAgain has the kubelet create its Node anew: the slices then belong to the new Node.
func (c *cluster) nodeAgain(t *testing.T, _ map[string]podState) {
	t.Helper()
	c.kubelet.stop(syscall.SIGTERM)
	if err := c.client.CoreV1().Nodes().Delete(t.Context(), hostName, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.kubelet.start(t)
	var node *v1.Node
	c.await(t, "the new Node", func() (err error) {
		node, err = c.client.CoreV1().Nodes().Get(t.Context(), hostName, metav1.GetOptions{})
		return err
	})
	c.label(t, "dra")
	c.await(t, "slices of the new Node", func() error {
		list, err := c.slices(t)
		for _, slice := range list {
			if len(slice.OwnerReferences) != 1 || slice.OwnerReferences[0].UID != node.UID {
				err = fmt.Errorf("%s is of %v, the Node is %s", slice.Name, slice.OwnerReferences, node.UID)
			}
		}
		return err
	})
	c.awaitSlices(t, "one one")
	c.runClaim(t, "after-node", "")
	c.remove(t, "after-node")
}

// forcedDeletion deletes a pod from the API while its container still runs and cannot end. The next claim
// is allocated its GPU, but gets it only when the container is gone.
func (c *cluster) forcedDeletion(t *testing.T) {
	t.Helper()
	began := time.Now()
	c.label(t, "whole")
	c.awaitSlices(t, "one one")
	exclusive := sharedBy("exclusive")
	c.claimTemplate(t, "faults-whole", exclusive)
	forced := claimPod("forced", "faults-whole")
	forced.Spec.TerminationGracePeriodSeconds = new(int64(3600))
	c.run(t, forced)
	c.runClaim(t, "beside-forced", exclusive)
	gpu, process := c.gpuNodes(t, "forced"), processes(t, c.awaitPhase(t, "forced", v1.PodRunning))[0]
	if err := syscall.Kill(process, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(process, syscall.SIGCONT) })
	if err := c.client.CoreV1().Pods(workspace).Delete(t.Context(), "forced", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}); err != nil {
		t.Fatal(err)
	}
	c.createClaim(t, "after-forced", exclusive, 1)
	c.awaitPrepareFailed(t, "after-forced", "forced")
	if err := syscall.Kill(process, syscall.SIGCONT); err != nil { // By now the process has received its signal to end.
		t.Fatal(err)
	}
	c.awaitPhase(t, "after-forced", v1.PodRunning)
	if err := syscall.Kill(process, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the next container runs beside that of the pod that was deleted by force: %v", err)
	}
	if got := c.gpuNodes(t, "after-forced"); !slices.Equal(got, gpu) {
		t.Errorf("the next pod has %q, the one before %q", got, gpu)
	}
	c.remove(t, "after-forced")
	c.remove(t, "beside-forced")
	c.report.note("dra faults: pod deleted by force", took(began))
}

// lateClaim allocates a device to a claim, as a scheduler does that does not know yet that the device
// belongs to the device plugin and a pod holds it.
func (c *cluster) lateClaim(t *testing.T, device string) {
	t.Helper()
	began := time.Now()
	c.label(t, "plugin")
	c.awaitSlices(t, "")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	holders := c.hold(t, "faults-holder", 2) // One on each GPU.
	before := c.podStates(t, holders)

	claims := c.client.ResourceV1().ResourceClaims(workspace)
	claim, err := claims.Create(t.Context(), &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "late-claim"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
			{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: draClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}},
		}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = claims.Delete(context.WithoutCancel(t.Context()), "late-claim", metav1.DeleteOptions{}) })
	late := claimPod("late-by-claim", "")
	late.Spec.ResourceClaims[0] = v1.PodResourceClaim{Name: "gpu", ResourceClaimName: new("late-claim")}
	late.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "virgate.test/by-hand"}}
	c.create(t, late)
	made, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), late.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
		Request: "gpu", Driver: draDriver, Pool: hostName + "/" + draDriver, Device: device,
		ShareID: new(types.UID("11111111-2222-3333-4444-555555555555")), ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")},
	}}}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: late.Name, UID: made.UID}}
	if _, err := claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.CoreV1().Pods(workspace).Patch(t.Context(), late.Name, types.MergePatchType, []byte(`{"spec":{"schedulingGates":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.client.CoreV1().Pods(workspace).Bind(t.Context(), &v1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: made.Name, UID: made.UID}, Target: v1.ObjectReference{Kind: "Node", Name: hostName},
	}, metav1.CreateOptions{}); err != nil && !apierrors.IsConflict(err) { // The scheduler may have been as fast.
		t.Fatal(err)
	}
	c.awaitPrepareFailed(t, late.Name, "offered by the device plugin")
	c.undisturbed(t, before)
	c.remove(t, holders...)
	c.awaitPhase(t, late.Name, v1.PodRunning)
	if got := c.gpuNodes(t, late.Name); len(got) != 1 {
		t.Errorf("a late claim has %q", got)
	}
	c.remove(t, late.Name)
	// No controller releases an allocation made by hand.
	if err := claims.Delete(t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.awaitSlices(t, "")
	c.report.note("dra faults: late claim", took(began))
}

// claimTemplate creates a template of claims for one device, for claimPod.
func (c *cluster) claimTemplate(t *testing.T, name, expression string) {
	t.Helper()
	templates := c.client.ResourceV1().ResourceClaimTemplates(workspace)
	_, err := templates.Create(t.Context(), &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu",
			Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: draClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
				Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}},
			},
		}}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = templates.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}) })
}

// claimPod returns a pod with its own claim by the template.
func claimPod(name, template string) *v1.Pod {
	with := pod(name, shared, 1)
	with.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	with.Spec.Containers[0].Resources = v1.ResourceRequirements{
		Claims:   []v1.ResourceClaim{{Name: "gpu"}},
		Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("1m")},
	}
	return with
}

// slices returns the node's ResourceSlices.
func (c *cluster) slices(t *testing.T) ([]resourceapi.ResourceSlice, error) {
	t.Helper()
	list, err := c.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + draDriver})
	if err != nil {
		return nil, err
	}
	if len(list.Items) == 0 {
		return nil, errNotYet
	}
	return list.Items, nil
}

// sliceWrites returns the slices' generations by UID; each write of a changed spec raises one.
func (c *cluster) sliceWrites(t *testing.T) map[types.UID]int64 {
	t.Helper()
	list, err := c.slices(t)
	if err != nil {
		t.Fatal(err)
	}
	generations := map[types.UID]int64{}
	for _, slice := range list {
		generations[slice.UID] = slice.Generation
	}
	return generations
}

// sliceUIDs returns the UIDs of the existing slices.
func (c *cluster) sliceUIDs(t *testing.T) (uids []types.UID) {
	t.Helper()
	list, _ := c.slices(t)
	for _, slice := range list {
		uids = append(uids, slice.UID)
	}
	return uids
}

// awaitClaimHealth waits until each pod's status gives this health of its claim's device, and the reason.
func (c *cluster) awaitClaimHealth(t *testing.T, names []string, want v1.ResourceHealthStatus, why string) {
	t.Helper()
	for _, name := range names {
		c.await(t, fmt.Sprintf("%s to be %s: %s", name, want, why), func() error {
			got, err := c.client.CoreV1().Pods(workspace).Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			var said []string
			for _, status := range got.Status.ContainerStatuses {
				for _, of := range status.AllocatedResourcesStatus {
					for _, device := range of.Resources {
						message := ""
						if device.Message != nil {
							message = *device.Message
						}
						if strings.HasPrefix(string(of.Name), "claim:") && device.Health == want && strings.Contains(message, why) {
							return nil
						}
						said = append(said, fmt.Sprintf("%s: %s is %s: %s", of.Name, device.ResourceID, device.Health, message))
					}
				}
			}
			return fmt.Errorf("its status says %q", said)
		})
	}
}

// awaitPrepareFailed waits until an event of the pod says that a device of its claim is not given, and
// names the holder.
func (c *cluster) awaitPrepareFailed(t *testing.T, name, holder string) {
	t.Helper()
	c.await(t, fmt.Sprintf("an event of pod %s that names %s", name, holder), func() error {
		events, err := c.client.CoreV1().Events(workspace).List(t.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Pod,involvedObject.name=" + name + ",reason=FailedPrepareDynamicResources",
		})
		if err != nil {
			return err
		}
		var said []string
		for _, event := range events.Items {
			said = append(said, event.Message)
			if strings.Contains(strings.ReplaceAll(event.Message, name, ""), holder) {
				return nil
			}
		}
		return fmt.Errorf("they say %q", said)
	})
}
