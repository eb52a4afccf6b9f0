package configsource

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
)

const (
	cutting = "flags: {migStrategy: mixed}\nmig: {manage: true, config: all-balanced}\n"
	layouts = "version: v1\nmig-configs: {mine: [{devices: all, mig-enabled: false}]}\n"
)

// labeledNode is a Node with both labels; "" omits one.
func labeledNode(profile, layout string) runtime.Object {
	node := fakeNode("n1", profile).(*metav1.PartialObjectMetadata)
	if layout != "" {
		metav1.SetMetaDataLabel(&node.ObjectMeta, MIGLabel, layout)
	}
	return node
}

// TestMIGLabel has the Node's other label choose a layout, if GPUs may be partitioned, over the same watch.
func TestMIGLabel(t *testing.T) {
	s := newTestNode(t, nil)
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": cutting, "b": four, "layouts": layouts}))
	s.nodes.Change("n1", labeledNode("a", ""))
	s.run()
	balanced := generation(t, cutting)
	s.await(balanced, "")
	disabled := generation(t, strings.Replace(cutting, "all-balanced", "all-disabled", 1))
	s.nodes.Change("n1", labeledNode("a", "all-disabled"))
	s.await(disabled, "")

	s.nodes.Change("n1", labeledNode("a", "min"))
	s.await(disabled, `ConfigMap gpu/profiles[a]: label nvidia.com/mig.config of node n1: MIG layout "min": no layout has this name, did you mean mine?`)
	if wanted, err := s.source.Profile(); !errors.Is(err, configs.ErrMIGLayout) || wanted.Name != "a" || wanted.Generation != "" {
		t.Errorf("got %+v, %v; want the name alone", wanted, err)
	}
	s.nodes.Change("n1", labeledNode("b", "min")) // Nothing is cut there.
	s.await(generation(t, four), "")
	s.nodes.Change("n1", labeledNode("a", "all-balanced"))
	s.await(balanced, "")
	s.nodes.Change("n1", labeledNode("a", "mine"))
	mine, err := configs.Documents{"a": strings.Replace(cutting, "all-balanced", "mine", 1), "layouts": layouts}.Select("", "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.await(mine.Generation, "")

	// A layout that is not allowed is refused like an unknown one, and so is one that would offer nothing.
	documents := configs.Documents{"a": "exclude: [9]\n" + strings.Replace(cutting, "config:", "allowed: [mine], config:", 1), "b": "mig: {manage: true}\n", "layouts": layouts}
	allowing, err := documents.Select("", "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	if mine, err = allowing.SelectMIG("mine"); err != nil {
		t.Fatal(err)
	}
	s.maps.Change("profiles", fakeConfigMap(documents))
	s.await(mine.Generation, "")
	s.nodes.Change("n1", labeledNode("a", "all-disabled"))
	s.await(mine.Generation, `ConfigMap gpu/profiles[a]: label nvidia.com/mig.config of node n1: MIG layout "all-disabled": mig.allowed does not have it, only ["mine"]`)
	if _, err := s.source.Profile(); !errors.Is(err, configs.ErrMIGLayout) {
		t.Errorf("%v is no fault of a layout", err)
	}
	s.nodes.Change("n1", labeledNode("a", ""))
	s.await(allowing.Generation, "")
	s.nodes.Change("n1", labeledNode("b", "all-balanced"))
	s.await(allowing.Generation, `ConfigMap gpu/profiles[b]: mig.config: MIG layout "all-balanced": GPUs with MIG are not offered with flags.migStrategy none, the default: choose mixed or single`)
	if _, err := s.source.Profile(); !errors.Is(err, configs.ErrMIGLayout) {
		t.Errorf("%v is no fault of a layout", err)
	}
	s.stop()
	if lists, watches := s.nodes.Answered(); lists != 1 || watches != 1 {
		t.Errorf("%d lists of the node, %d watches", lists, watches)
	}
}

// TestMIGManager leaves the MIG layouts to mig-manager if a label shows that the operator runs it, or if another
// program writes their state.
func TestMIGManager(t *testing.T) {
	s := newTestNode(t, nil)
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": cutting, "b": four}))
	long, then := metav1.NewTime(time.Unix(1, 0)), metav1.NewTime(time.Unix(2, 0))
	state := func(manager string, at metav1.Time) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{Manager: manager, Time: &at, FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:nvidia.com/mig.config.state":{}}}}`)}
	}
	set := func(profile, layout string, fields []metav1.ManagedFieldsEntry, labels ...string) {
		node := labeledNode(profile, layout).(*metav1.PartialObjectMetadata)
		node.ManagedFields = append([]metav1.ManagedFieldsEntry{{Manager: "kubelet", Time: &then, FieldsV1: metav1.NewFieldsV1("{}")}}, fields...)
		for i := 0; i < len(labels); i += 2 {
			metav1.SetMetaDataLabel(&node.ObjectMeta, labels[i], labels[i+1])
		}
		s.nodes.Change("n1", node)
	}
	leftover := []metav1.ManagedFieldsEntry{state("nvidia-mig-manager", long)}
	set("a", "", leftover)
	s.run()
	own, err := configs.Documents{"a": cutting}.Select("", "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.await(own.Generation, "")
	left := func(why string) string { return own.LeaveMIG(why).Generation }
	operator := left("the label nvidia.com/gpu.deploy.mig-manager of node n1 is true, so the GPU Operator's mig-manager makes the MIG layouts; with false, Virgate does")
	other := left("nvidia-mig-manager has written the label nvidia.com/mig.config.state of node n1, so it makes the MIG layouts; when it is gone, and nvidia.com/gpu.deploy.mig-manager is false, Virgate does")

	const deploy = "nvidia.com/gpu.deploy.mig-manager"
	set("a", "of-mig-managers-own-file", leftover, deploy, "true") // It is for mig-manager to know.
	s.await(operator, "")
	set("b", "", leftover, deploy, "true")
	s.await(generation(t, four), "")
	set("a", "", leftover, deploy, "false")
	s.await(own.Generation, "")

	set("a", "all-disabled", []metav1.ManagedFieldsEntry{state("virgate", then)})
	s.await(generation(t, strings.Replace(cutting, "all-balanced", "all-disabled", 1)), "")
	set("a", "", []metav1.ManagedFieldsEntry{state("nvidia-mig-manager", then)})
	s.await(other, "")
	set("a", "", []metav1.ManagedFieldsEntry{state("nvidia-mig-manager", then)}, deploy, "false")
	s.await(own.Generation, "")
}

// TestPauseIn checks which labels pause the GPUs, for what, and which values are unknown.
func TestPauseIn(t *testing.T) {
	const plugin, client, dra = "nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.dra-driver"
	for _, test := range []struct {
		name    string
		labels  map[string]string
		want    Pause
		unknown []Pause
	}{
		{"no label", nil, Pause{}, nil},
		{"a node of the operator", map[string]string{plugin: "true", client: "true", dra: "", "nvidia.com/gpu.deploy.dcgm": "paused-for-driver-upgrade"}, Pause{}, nil},
		{"the device plugin is not deployed", map[string]string{plugin: "false"}, Pause{}, nil},
		{"a change of MIG layouts", map[string]string{plugin: "paused-for-mig-change", client: "true"}, Pause{plugin, "paused-for-mig-change"}, nil},
		{"an upgrade", map[string]string{client: "paused-for-driver-upgrade"}, Pause{client, "paused-for-driver-upgrade"}, nil},
		{"a node that is run by DRA", map[string]string{dra: "paused-for-driver-upgrade"}, Pause{dra, "paused-for-driver-upgrade"}, nil},
		{"a value of one's own", map[string]string{plugin: "mine_paused-for-driver-upgrade"}, Pause{plugin, "mine_paused-for-driver-upgrade"}, nil},
		{"for a reason to come", map[string]string{plugin: "paused-for-lunch"}, Pause{plugin, "paused-for-lunch"}, nil},
		{"both", map[string]string{plugin: "paused-for-mig-change", client: "paused-for-driver-upgrade"}, Pause{client, "paused-for-driver-upgrade"}, nil},
		{"two labels", map[string]string{plugin: "paused-for-driver-upgrade", client: "paused-for-driver-upgrade"}, Pause{plugin, "paused-for-driver-upgrade"}, nil},
		{"unknown", map[string]string{plugin: "mine", client: "paused"}, Pause{}, []Pause{{plugin, "mine"}, {client, "paused"}}},
		{"unknown and a pause", map[string]string{plugin: "mine", client: "paused-for-mig-change"}, Pause{client, "paused-for-mig-change"}, []Pause{{plugin, "mine"}}},
	} {
		got, unknown := pauseIn(test.labels)
		if got != test.want || !slices.Equal(unknown, test.unknown) {
			t.Errorf("%s: %+v, unknown %+v", test.name, got, unknown)
		}
	}
}

// TestPaused checks that a pause begins with the label, ends five seconds after the last label asked for one,
// with a notification, and is unknown before the Node is. An unknown value is logged once.
func TestPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const plugin = "nvidia.com/gpu.deploy.device-plugin"
		var log strings.Builder
		nodes := newFakeServer()
		labels := NewNodeLabels(nodes, "n1", labelName, slog.New(slog.NewTextHandler(&log, nil)))
		if _, known := labels.Paused(); known {
			t.Error("known before the node")
		}
		set := func(value string) {
			node := labeledNode("a", "").(*metav1.PartialObjectMetadata)
			metav1.SetMetaDataLabel(&node.ObjectMeta, plugin, value)
			nodes.Change("n1", node)
		}
		var mu sync.Mutex // A timer's goroutine calls changed, too.
		pauses := []bool{}
		changed := func() {
			mu.Lock()
			defer mu.Unlock()
			if pause, known := labels.Paused(); known && (len(pauses) == 0 || pauses[len(pauses)-1] != (pause != Pause{})) {
				pauses = append(pauses, pause != Pause{})
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		set("true")
		go func() { ended <- labels.Watch(ctx, changed) }()
		were := func(want ...bool) bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.Equal(pauses, want)
		}
		pass := func(d time.Duration) {
			<-time.After(d) //nolint:forbidigo // in a synctest bubble: the time is simulated
			synctest.Wait()
		}
		pass(time.Second)
		for range 20 { // A driver manager that fails again and again.
			set("paused-for-driver-upgrade")
			pass(time.Second)
			set("true")
			pass(4 * time.Second)
		}
		if pause, _ := labels.Paused(); pause != (Pause{plugin, "paused-for-driver-upgrade"}) || !were(false, true) {
			t.Errorf("%+v after %v", pause, pauses)
		}
		pass(time.Second)
		if !were(false, true, false) {
			t.Errorf("in the end %v", pauses)
		}
		for _, value := range []string{"mine", "true", "mine", "paused-for-mig-change"} {
			set(value)
			pass(time.Second)
		}
		if want := `msg="label of the Node not understood, and no pause" label=` + plugin + ` value=mine`; strings.Count(log.String(), want) != 1 {
			t.Errorf("the log is %s", log.String())
		}
		if !were(false, true, false, true) {
			t.Errorf("a pause that comes soon after another: %v", pauses)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestRunningClients checks that DCGM and its exporter run where their labels are true, and are left to mig-manager
// if that runs.
func TestRunningClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const dcgm, exporter = "nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.dcgm-exporter"
		nodes := newFakeServer()
		labels := NewNodeLabels(nodes, "n1", labelName, slog.New(slog.DiscardHandler))
		if running := labels.RunningClients(); running != nil {
			t.Errorf("before the node: %q", running)
		}
		nodes.Change("n1", labeledNode("a", ""))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- labels.Watch(ctx, func() {}) }()
		for _, test := range []struct {
			labels map[string]string
			want   []string
		}{
			{nil, nil},
			{map[string]string{dcgm: "true", exporter: "true"}, []string{dcgm, exporter}},
			{map[string]string{dcgm: "false", exporter: "true"}, []string{exporter}},
			{map[string]string{dcgm: "true", exporter: "paused-for-driver-upgrade"}, []string{dcgm}},
			{map[string]string{dcgm: "true", exporter: "true", migManagerLabel: "true"}, nil},
			{map[string]string{dcgm: "true", exporter: "true", migManagerLabel: "false"}, []string{dcgm, exporter}},
			{map[string]string{"nvidia.com/gpu.deploy.gpu-feature-discovery": "true"}, nil},
		} {
			node := labeledNode("a", "").(*metav1.PartialObjectMetadata)
			for label, value := range test.labels {
				metav1.SetMetaDataLabel(&node.ObjectMeta, label, value)
			}
			nodes.Change("n1", node)
			<-time.After(time.Second) //nolint:forbidigo // in a synctest bubble: the time is simulated
			synctest.Wait()
			if got := labels.RunningClients(); !slices.Equal(got, test.want) {
				t.Errorf("%q: %q run, want %q", test.labels, got, test.want)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestReplaced gets each new Node of the name once, also one recreated while the watch was down.
func TestReplaced(t *testing.T) {
	s := newTestNode(t, nil)
	heard := make(chan struct{}, 10)
	s.source.Labels.Replaced = func() { heard <- struct{}{} }
	node := func(uid types.UID, profile string) runtime.Object {
		node := fakeNode("n1", profile).(*metav1.PartialObjectMetadata)
		node.UID = uid
		return node
	}
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten}))
	s.nodes.Change("n1", node("1", "a"))
	s.run()
	<-heard
	s.await(generation(t, four), "")
	s.nodes.Change("n1", node("1", "b"))
	s.await(generation(t, ten), "")
	s.nodes.Change("n1", nil)
	s.await(generation(t, ten), "not there")
	s.nodes.Change("n1", node("2", "b"))
	<-heard
	s.nodes.SetAway(errors.New("connection refused"))
	s.nodes.Change("n1", nil)
	s.nodes.Change("n1", node("3", "a"))
	s.nodes.Expire()
	s.nodes.SetAway(nil)
	<-heard
	s.await(generation(t, four), "")
	s.nodes.Drop()
	s.nodes.Change("n1", node("3", "b"))
	s.await(generation(t, ten), "")
	if len(heard) > 0 {
		t.Errorf("heard of a Node %d times more", len(heard))
	}
}

func fakePod(uid, name string, ids map[string]string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, UID: types.UID(uid)}}
	for container, id := range ids {
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, corev1.ContainerStatus{Name: container, ContainerID: id})
	}
	return pod
}

func TestPods(t *testing.T) {
	server := newFakeServer()
	pods := NewPods(server, "n1", slog.New(slog.DiscardHandler))
	server.SetAway(errors.New("forbidden"))
	changes := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- pods.Watch(ctx, func() { changes <- struct{}{} }) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	late := time.NewTimer(await.Patience)
	defer late.Stop()
	expect := func(want map[string]sharing.Container) {
		t.Helper()
		for {
			select {
			case <-changes:
			case <-late.C:
				got, err := pods.Containers()
				t.Fatalf("got %v, %v; want %v", got, err, want)
			}
			if got, err := pods.Containers(); err == nil && maps.Equal(got, want) {
				return
			}
		}
	}
	<-changes
	if _, err := pods.Containers(); !errors.Is(err, configs.ErrPending) || err.Error() != "pods of node n1: not known yet: list pods of node n1: forbidden" {
		t.Errorf("before the pods are known: %v", err)
	}
	server.SetAway(nil)
	expect(nil)
	server.Change("p", fakePod("1", "p", map[string]string{"waits": ""}))
	server.Change("q", fakePod("2", "q", map[string]string{"y": "c://2y", "x": "c://2x"}))
	expect(map[string]sharing.Container{"2x": {Namespace: "a", Pod: "q", Name: "x"}, "2y": {Namespace: "a", Pod: "q", Name: "y"}})
	if uid, none := pods.PodUID("a", "q"), pods.PodUID("b", "q"); uid != "2" || none != "" {
		t.Errorf("UID of a/q %q, of b/q %q", uid, none)
	}
	server.Change("q of before", fakePod("3", "q", map[string]string{"x": "c://3"}))
	expect(map[string]sharing.Container{"2x": {Namespace: "a", Pod: "q", Name: "x"}, "2y": {Namespace: "a", Pod: "q", Name: "y"}, "3": {Namespace: "a", Pod: "q", Name: "x"}})
	if uid := pods.PodUID("a", "q"); uid != "" {
		t.Errorf("of two pods of one name the UID is %q", uid)
	}
	server.Change("q of before", nil)
	expect(map[string]sharing.Container{"2x": {Namespace: "a", Pod: "q", Name: "x"}, "2y": {Namespace: "a", Pod: "q", Name: "y"}})
	server.Change("p", fakePod("1", "p", map[string]string{"waits": "c://1"}))
	expect(map[string]sharing.Container{
		"1": {Namespace: "a", Pod: "p", Name: "waits"}, "2x": {Namespace: "a", Pod: "q", Name: "x"}, "2y": {Namespace: "a", Pod: "q", Name: "y"},
	})
	server.Change("q", nil)
	expect(map[string]sharing.Container{"1": {Namespace: "a", Pod: "p", Name: "waits"}})

	// Another pod of the same name, while the watch is down.
	server.SetAway(errors.New("refused"))
	server.Change("p", nil)
	server.Change("p", fakePod("3", "p", map[string]string{"waits": "c://3"}))
	server.Expire()
	lost := func() bool {
		got, err := pods.Containers()
		return len(got) == 1 && got["1"].Pod == "p" && err != nil && strings.Contains(err.Error(), "as last seen: ") && strings.Contains(err.Error(), "refused")
	}
	for !lost() {
		select {
		case <-changes:
		case <-late.C:
			got, err := pods.Containers()
			t.Fatalf("got %v, %v when the right to them is gone", got, err)
		}
	}
	if uid := pods.PodUID("a", "p"); uid != "" {
		t.Errorf("as last seen: the UID is %q", uid)
	}
	server.SetAway(nil)
	expect(map[string]sharing.Container{"3": {Namespace: "a", Pod: "p", Name: "waits"}})
}

// TestWithLabel checks that the forecast for another label matches the result once the Node has that label.
func TestWithLabel(t *testing.T) {
	s := newTestNode(t, nil)
	if _, err := s.source.WithLabel(labelName, "a"); !errors.Is(err, configs.ErrPending) {
		t.Errorf("before the Node was read: %v", err)
	}
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"a": cutting, "b": four}))
	s.nodes.Change("n1", labeledNode("a", ""))
	s.run()
	s.await(generation(t, cutting), "")
	for _, test := range []struct{ label, value, refusal string }{
		{labelName, "b", ""},
		{labelName, "none", "the profiles are a, b"},
		{MIGLabel, "all-disabled", ""},
		{MIGLabel, "min", `MIG layout "min": no layout has this name`},
	} {
		want, wantErr := s.source.WithLabel(test.label, test.value)
		if profile, _ := s.source.Profile(); profile.Generation != generation(t, cutting) {
			t.Errorf("%s: %s is in force", test.value, profile)
		}
		if (wantErr == nil) != (test.refusal == "") || wantErr != nil && !strings.Contains(wantErr.Error(), test.refusal) {
			t.Errorf("%s: %v, want %q", test.value, wantErr, test.refusal)
		}
		if test.label == MIGLabel {
			s.nodes.Change("n1", labeledNode("a", test.value))
		} else {
			s.nodes.Change("n1", labeledNode(test.value, ""))
		}
		if wantErr == nil {
			s.await(want.Generation, "")
		} else {
			s.await(generation(t, cutting), wantErr.Error())
		}
		if got, err := s.source.Profile(); got.Generation != want.Generation || got.String() != want.String() || (err == nil) != (wantErr == nil) {
			t.Errorf("%s: %s, %v; foreseen were %s, %v", test.value, got, err, want, wantErr)
		}
		s.nodes.Change("n1", labeledNode("a", ""))
		s.await(generation(t, cutting), "")
	}

	s.nodes.Change("n1", labeledNode("b", ""))
	s.await(generation(t, four), "")
	none := &NodeSource{Source: s.source.Source, Started: s.source.Started}
	for _, test := range []struct {
		source       *NodeSource
		label, value string
		want         string
	}{
		{s.source, MIGLabel, "all-disabled", "ConfigMap gpu/profiles[b]: it does not have mig.manage: true"},
		{s.source, "my/label", "a", "the label my/label is not looked at there, but " + labelName},
		{none, labelName, "a", "no label is looked at there"},
	} {
		if _, err := test.source.WithLabel(test.label, test.value); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.label, err, test.want)
		}
	}
	// The program that makes the layouts is named, and the profile is not at fault.
	left := labeledNode("a", "").(*metav1.PartialObjectMetadata)
	metav1.SetMetaDataLabel(&left.ObjectMeta, migManagerLabel, "true")
	s.nodes.Change("n1", left)
	own, err := configs.Documents{"a": cutting}.Select("", "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.await(own.LeaveMIG("the label "+migManagerLabel+" of node n1 is true, so the GPU Operator's mig-manager makes the MIG layouts; with false, Virgate does").Generation, "")
	if selected, err := s.source.WithLabel(MIGLabel, "of-mig-managers-own-file"); err != nil || !strings.Contains(selected.Profile.MIG.LeftTo, migManagerLabel) {
		t.Errorf("%+v, %v", selected.Profile.MIG, err)
	}
}
