package api

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	kubeletdra "k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// draClaims is a table of claims that gives each claim what was allocated.
type draClaims struct {
	mutex    sync.Mutex
	prepared map[string]dra.Claim
	reason   string
	changed  chan struct{}
}

func newDRAClaims() *draClaims {
	return &draClaims{prepared: map[string]dra.Claim{}, changed: make(chan struct{})}
}

func (c *draClaims) change(change func()) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	change()
	close(c.changed)
	c.changed = make(chan struct{})
}

// Prepare and the next two methods implement dradriver.Claims.
func (c *draClaims) Prepare(_ context.Context, claim dra.Claim) (names [][]string, err error) {
	c.change(func() { c.prepared[claim.UID] = claim })
	for _, r := range claim.Results {
		names = append(names, []string{"virgate.github.io/gpu=" + r.Device})
	}
	return names, nil
}

func (c *draClaims) Unprepare(claim dra.Claim) error {
	c.change(func() { delete(c.prepared, claim.UID) })
	return nil
}

func (c *draClaims) Devices() ([]dra.DeviceHealth, <-chan struct{}) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	var all []dra.DeviceHealth
	for _, claim := range c.prepared {
		for _, r := range claim.Results {
			all = append(all, dra.DeviceHealth{Device: r.Device, Healthy: c.reason == "", Reason: c.reason})
		}
	}
	return all, c.changed
}

func (c *draClaims) has() int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return len(c.prepared)
}

// draOffer is the offer of a node of eight H100 that are divided on demand: shares, partitions and whole
// GPUs, in more than one slice. The GPU of index faulty is unhealthy.
func draOffer(t *testing.T, faulty int) []resourceapi.ResourceSlice {
	t.Helper()
	library, err := simnode.New("h100x8")
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := nvml.Scan(library)
	if err != nil {
		t.Fatal(err)
	}
	profile := sharing.Profile{
		MIGStrategy: sharing.MIGMixed, Policy: sharing.Packed, GPUNames: []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
		TimeSlicing: []sharing.ReplicatedResource{{Resource: "nvidia.com/mig-1g.10gb", Replicas: 4}},
		MIG:         sharing.MIGConfig{Manage: true}, DRA: sharing.DRAConfig{All: true, DynamicMIG: true},
	}
	n := dra.Node{Name: "n1", Driver: dra.DriverName, GPUs: gpus, Profile: profile, OnDemand: map[string]mig.Geometry{}}
	for i, gpu := range gpus {
		state, err := nvml.NewPartitioner(library, nil).State(t.Context(), gpu.UUID)
		if err != nil {
			t.Fatal(err)
		}
		n.OnDemand[gpu.UUID] = state.Geometry
		if i == faulty {
			gpus[i].Health = sharing.Faulty("XID 79")
		}
	}
	n.Plan = sharing.NewPlan(gpus, profile)
	offer, err := dra.Build(n)
	if err != nil {
		t.Fatal(err)
	}
	return offer.Slices
}

// draDriver starts a driver of the node n1.
func (s *server) draDriver(t *testing.T, claims dradriver.Claims, registry string) (*dradriver.Driver, func()) {
	t.Helper()
	return s.draDriverAs(t, s.config(adminToken), claims, registry)
}

func (s *server) draDriverAs(t *testing.T, config *rest.Config, claims dradriver.Claims, registry string) (*dradriver.Driver, func()) {
	t.Helper()
	d, err := dradriver.New(dradriver.Options{
		Driver: dra.DriverName, Node: "n1", PodUID: "pod", Dir: t.TempDir(), RegistryDir: registry, Config: config,
		Claims: claims, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := d.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	stop := func() { cancel(); <-ended }
	t.Cleanup(stop)
	return d, stop
}

// published waits until the pool is complete and equals the offer, and returns its slices.
func (s *server) published(t *testing.T, offered []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
	t.Helper()
	var list *resourceapi.ResourceSliceList
	s.await("the slices", func() bool {
		var err error
		list, err = s.admin.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		s.must(err)
		return slices.EqualFunc(list.Items, offered, func(a, b resourceapi.ResourceSlice) bool {
			return a.Name == b.Name && a.Spec.Pool.Generation == list.Items[0].Spec.Pool.Generation && a.Spec.Pool.ResourceSliceCount == int64(len(offered)) &&
				*a.Spec.NodeName == "n1" && resourceslice.DevicesDeepEqual(a.Spec.Devices, b.Spec.Devices) && len(a.Spec.SharedCounters) == len(b.Spec.SharedCounters)
		})
	})
	return list.Items
}

func (s *server) nodeUID(t *testing.T) types.UID {
	t.Helper()
	node, err := s.admin.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	s.must(err)
	return node.UID
}

// wipe deletes all slices, as the kubelet and the garbage collector do.
func (s *server) wipe(t *testing.T) {
	t.Helper()
	s.must(s.admin.ResourceV1().ResourceSlices().DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "spec.nodeName=n1"}))
}

// testDRASlices checks that offers are published, that deleted slices are restored, and that a fault costs
// one write.
func testDRASlices(t *testing.T, s *server) {
	s.setNode("n1", "")
	d, stop := s.draDriver(t, newDRAClaims(), t.TempDir())
	healthy, faulty := draOffer(t, -1), draOffer(t, 3)
	d.Publish(healthy)
	before := s.published(t, healthy)
	if len(before) < 5 || before[0].OwnerReferences[0].UID != s.nodeUID(t) {
		t.Errorf("%d slices of %v", len(before), before[0].OwnerReferences)
	}
	// The GPU's partitions are in one slice, and the whole GPU is in another: if two slices change, all do.
	d.Publish(faulty)
	if after := s.published(t, faulty); after[0].Spec.Pool.Generation != before[0].Spec.Pool.Generation+1 {
		t.Errorf("generation %d after a fault of a GPU on demand", after[0].Spec.Pool.Generation)
	}
	for range 3 {
		s.wipe(t)
		s.published(t, faulty)
	}
	old := s.nodeUID(t)
	s.removeNode("n1")
	s.wipe(t)
	s.await("the Node to be missed", func() bool { return strings.Contains(fmt.Sprint(d.State().Problems), `nodes "n1" not found`) })
	s.setNode("n1", "")
	for _, slice := range s.published(t, faulty) {
		if uid := slice.OwnerReferences[0].UID; uid == old || uid != s.nodeUID(t) {
			t.Errorf("%s belongs to node %s", slice.Name, uid)
		}
	}
	// A fault in one slice is one write.
	whole, fault := draOffer(t, -1), draOffer(t, 3)
	for i := range fault {
		fault[i].Spec.Devices = slices.Clone(fault[i].Spec.Devices)
		for j := range fault[i].Spec.Devices {
			if i != len(fault)-1 {
				fault[i].Spec.Devices[j].Taints = nil
			}
		}
	}
	d.Publish(whole)
	s.published(t, whole)
	writes := d.State().Writes
	d.Publish(fault)
	s.published(t, fault)
	if n := d.State().Writes - writes; n != 1 {
		t.Errorf("the fault was written %d times", n)
	}
	// The driver reports what the API server refuses, and goes on with the next valid offer.
	bad := draOffer(t, -1)
	bad[len(bad)-1].Spec.Devices[0].Name = "No Label"
	d.Publish(bad)
	s.await("the refusal", func() bool { return strings.Contains(fmt.Sprint(d.State().Problems), "No Label") })
	d.Publish(healthy)
	s.published(t, healthy)
	s.await("nothing wrong", func() bool { return len(d.State().Problems) == 0 })
	stop()

	// A successor finds everything as it should be.
	was := s.published(t, healthy)
	d, _ = s.draDriver(t, newDRAClaims(), t.TempDir())
	d.Publish(healthy)
	s.await("the successor", func() bool { return d.State().Slices == len(healthy) })
	if n := d.State().Writes; n != 0 || s.published(t, healthy)[0].ResourceVersion != was[0].ResourceVersion {
		t.Errorf("the successor wrote %d times", n)
	}
}

// draKubelet is the kubelet's own code for DRA drivers.
type draKubelet struct {
	*kubeletdra.Manager
	stop func()
}

type ready struct{}

func (ready) AddSource(string) {}
func (ready) AllReady() bool   { return true }

// draKubelet starts one. Like every kubelet, it first deletes the node's slices.
func (s *server) draKubelet(t *testing.T, registry, state string) draKubelet {
	t.Helper()
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.Logger{}))
	manager, err := kubeletdra.NewManager(klog.Logger{}, s.admin, state)
	s.must(err)
	getNode := func(ctx context.Context) (*corev1.Node, error) {
		return s.admin.CoreV1().Nodes().Get(ctx, "n1", metav1.GetOptions{})
	}
	s.must(manager.Start(ctx, func() []*corev1.Pod { return nil }, getNode, ready{}))
	plugins := pluginmanager.NewPluginManager(registry, record.NewFakeRecorder(100))
	plugins.AddHandler(registration.DRAPlugin, manager.GetWatcherHandler())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		plugins.Run(ctx, ready{}, ctx.Done())
	}()
	stop := func() {
		cancel()
		<-ended
		// It writes its state when it has lost the driver.
		s.await("the kubelet's end", func() bool {
			stacks := make([]byte, 1<<20)
			return !bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("dra.(*Manager).HandleWatchResourcesStream"))
		})
	}
	t.Cleanup(stop)
	return draKubelet{manager, stop}
}

// allocate makes a claim with that device, and a pod that uses it.
func (s *server) allocate(t *testing.T, name, pool, device string, share types.UID) *corev1.Pod {
	t.Helper()
	claims := s.admin.ResourceV1().ResourceClaims("default")
	claim, err := claims.Create(t.Context(), &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "any", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}, metav1.CreateOptions{})
	s.must(err)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)}}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "claim", ResourceClaimName: &name}}
	container := corev1.Container{Name: "main"}
	container.Resources.Claims = []corev1.ResourceClaim{{Name: "claim"}}
	pod.Spec.Containers = []corev1.Container{container}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
		Request: "gpu", Driver: dra.DriverName, Pool: pool, Device: device, ShareID: &share,
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")},
	}}}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: pod.UID}}
	_, err = claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{})
	s.must(err)
	return pod
}

// testDRAKubelet checks that the kubelet's own code registers the driver, has claims prepared and
// unprepared, learns of faults, and gets back the slices that it deletes when it starts.
func testDRAKubelet(t *testing.T, s *server) {
	s.setNode("n1", "")
	registry, state := t.TempDir(), t.TempDir()
	claims := newDRAClaims()
	d, _ := s.draDriver(t, claims, registry)
	offer := draOffer(t, -1)
	d.Publish(offer)
	s.published(t, offer)
	first := s.draKubelet(t, registry, state)
	s.await("the registration", func() bool { return d.State().Registered })
	s.published(t, offer)

	const share = "11111111-2222-3333-4444-555555555555"
	pool := dra.PoolName("n1", dra.DriverName)
	pod := s.allocate(t, "pod-a", pool, "gpu-1-ts", share)
	ctx := klog.NewContext(t.Context(), klog.Logger{})
	s.must(first.PrepareResources(ctx, pod))
	info, err := first.GetResources(pod, &pod.Spec.Containers[0])
	s.must(err)
	if got := fmt.Sprint(info.CDIDevices); !strings.Contains(got, "virgate.github.io/gpu=gpu-1-ts") {
		t.Errorf("the container gets %s", got)
	}
	health := func(k draKubelet) string {
		status := corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "main"}}}
		k.UpdateAllocatedResourcesStatus(pod, &status)
		if all := status.ContainerStatuses[0].AllocatedResourcesStatus; len(all) == 1 && len(all[0].Resources) == 1 {
			return string(all[0].Resources[0].Health)
		}
		return ""
	}
	s.await("health", func() bool { return health(first) == "Healthy" })
	claims.change(func() { claims.reason = "XID 79" })
	s.await("the fault", func() bool { return health(first) == "Unhealthy" })

	// The kubelet starts anew: it wipes the slices, finds the driver, and prepares again.
	first.stop()
	before := s.published(t, offer)
	second := s.draKubelet(t, registry, state)
	s.await("the second kubelet", func() bool { return health(second) == "Unhealthy" })
	s.await("new slices", func() bool { return s.published(t, offer)[0].UID != before[0].UID })
	s.must(second.PrepareResources(ctx, pod))
	s.must(second.UnprepareResources(ctx, pod))
	if n := claims.has(); n != 0 {
		t.Errorf("%d claims are left", n)
	}
}

// testDRARights checks that the chart's rights suffice for the driver, and that its policy only lets it
// write slices of its own node and driver.
func testDRARights(t *testing.T, s *server) {
	s.setNode("n1", "")
	s.setNode("n2", "")
	config := s.podToken("n1")
	s.createRole("virgate-dra", "clusterrole-dra.yaml")
	s.bind("virgate-dra", "virgate-dra", rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: "virgate", Name: "virgate"})
	s.applyFile("../../../charts/virgate/files/admission-dra.yaml")
	client, err := kubernetes.NewForConfig(config)
	s.must(err)
	own := resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "try-"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: dra.DriverName, NodeName: new("n1"), Pool: resourceapi.ResourcePool{Name: "n1/" + dra.DriverName, Generation: 1, ResourceSliceCount: 1},
	}}
	try := func(change func(*resourceapi.ResourceSlice)) error {
		slice := own.DeepCopy()
		change(slice)
		_, err := client.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	node := func(name string) func(*resourceapi.ResourceSlice) {
		return func(slice *resourceapi.ResourceSlice) { slice.Spec.NodeName = &name }
	}
	s.await("the rights and the policy to hold", func() bool { return apierrors.IsInvalid(try(node("n2"))) })
	for _, test := range []struct {
		name   string
		change func(*resourceapi.ResourceSlice)
		why    string
	}{
		{"its own", func(*resourceapi.ResourceSlice) {}, ""},
		{"another node's", node("n2"), "virgate of node n1 writes ResourceSlices of that node only"},
		{"all nodes'", func(slice *resourceapi.ResourceSlice) { slice.Spec.NodeName, slice.Spec.AllNodes = nil, new(true) }, "of that node only"},
		{"selected nodes'", func(slice *resourceapi.ResourceSlice) {
			slice.Spec.NodeName, slice.Spec.NodeSelector = nil, &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"}}},
			}}}
		}, "of that node only"},
		{"nodes by device", func(slice *resourceapi.ResourceSlice) {
			slice.Spec.NodeName, slice.Spec.PerDeviceNodeSelection = nil, new(true)
		}, "of that node only"},
		{"another driver's", func(slice *resourceapi.ResourceSlice) { slice.Spec.Driver = "gpu.nvidia.com" }, "of the driver gpu.virgate.github.io only"},
		{"another pool", func(slice *resourceapi.ResourceSlice) { slice.Spec.Pool.Name = "n11/" + dra.DriverName }, "its node's name and its driver's"},
		{"another owner", func(slice *resourceapi.ResourceSlice) {
			slice.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n2", UID: "u"}}
		}, "belong to its node"},
	} {
		err := try(test.change)
		if test.why == "" && err != nil || test.why != "" && (err == nil || !strings.Contains(err.Error(), test.why)) {
			t.Errorf("%s: %v, want %q", test.name, err, test.why)
		}
	}
	theirs := own.DeepCopy()
	theirs.Name, theirs.GenerateName, theirs.Spec.NodeName = "theirs", "", new("n2")
	theirs.Spec.Pool.Name = "n2/" + dra.DriverName
	theirs, err = s.admin.ResourceV1().ResourceSlices().Create(t.Context(), theirs, metav1.CreateOptions{})
	s.must(err)
	theirs.Spec.Devices = []resourceapi.Device{{Name: "d"}}
	if _, err := client.ResourceV1().ResourceSlices().Update(t.Context(), theirs, metav1.UpdateOptions{}); err == nil || !strings.Contains(err.Error(), "of that node only") {
		t.Errorf("change another node's: %v", err)
	}
	if err := client.ResourceV1().ResourceSlices().Delete(t.Context(), "theirs", metav1.DeleteOptions{}); err == nil || !strings.Contains(err.Error(), "of that node only") {
		t.Errorf("delete another node's: %v", err)
	}
	if err := client.ResourceV1().ResourceSlices().DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("delete all: %v", err)
	}
	s.must(s.admin.ResourceV1().ResourceSlices().Delete(t.Context(), "theirs", metav1.DeleteOptions{}))

	// The rights include what the driver does: make, change, delete, and read claims.
	registry := t.TempDir()
	claims := newDRAClaims()
	d, _ := s.draDriverAs(t, config, claims, registry)
	many := draOffer(t, -1)
	d.Publish(many)
	s.published(t, many)
	faulty := draOffer(t, 0)
	d.Publish(faulty)
	s.published(t, faulty)
	one := faulty[len(faulty)-1:]
	one[0].Name, one[0].Spec.Pool.ResourceSliceCount = faulty[0].Name, 1
	for i := range one[0].Spec.Devices {
		one[0].Spec.Devices[i].ConsumesCounters = nil
	}
	d.Publish(one)
	s.published(t, one)
	kubelet := s.draKubelet(t, registry, t.TempDir())
	s.await("the registration", func() bool { return d.State().Registered })
	s.must(kubelet.PrepareResources(klog.NewContext(t.Context(), klog.Logger{}), s.allocate(t, "rights", "n1/"+dra.DriverName, "gpu", "11111111-2222-3333-4444-555555555555")))
	s.wipe(t)
	s.published(t, one)
	s.await("nothing wrong", func() bool { return len(d.State().Problems) == 0 })
}

// TestDRAFeaturesOff checks that on an API server that drops fields, the driver names them and works with
// the rest.
func TestDRAFeaturesOff(t *testing.T) {
	s := startServer(t, "--feature-gates=DRAPartitionableDevices=false,DRAConsumableCapacity=false,DRADeviceTaints=false")
	s.setNode("n1", "")
	d, _ := s.draDriver(t, newDRAClaims(), t.TempDir())
	offer := draOffer(t, 0)
	d.Publish(offer)
	s.await("what is left out", func() bool {
		return d.State().Without == dra.Features{Taints: true, Counters: true, Shares: true} && d.State().Slices == len(offer)
	})
	writes := d.State().Writes
	if writes != len(offer) {
		t.Errorf("%d writes for %d slices", writes, len(offer))
	}
	s.wipe(t)
	s.await("the slices", func() bool {
		list, err := s.admin.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		s.must(err)
		return len(list.Items) == len(offer)
	})
	if d.State().Without.Other {
		t.Errorf("left out: %+v", d.State().Without)
	}
}
