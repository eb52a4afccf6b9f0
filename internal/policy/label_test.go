package policy

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/configs"
)

const (
	cutting = "mig: {manage: true, config: all-balanced}\n"
	layouts = "version: v1\nmig-configs: {mine: [{devices: all, mig-enabled: false}]}\n"
)

// labelled is a Node with both labels; "" is none.
func labelled(profile, layout string) runtime.Object {
	node := fakeNode("n1", profile).(*metav1.PartialObjectMetadata)
	if layout != "" {
		metav1.SetMetaDataLabel(&node.ObjectMeta, MIGLabel, layout)
	}
	return node
}

// TestMIGLabel has the Node's other label choose among the layouts, where boards
// may be cut, over the same watch.
func TestMIGLabel(t *testing.T) {
	s := newSite(t, nil)
	s.maps.change("profiles", fakeConfigMap(map[string]string{"a": cutting, "b": four, "layouts": layouts}))
	s.nodes.change("n1", labelled("a", ""))
	s.run()
	balanced := generation(t, cutting)
	s.await(balanced, "")
	disabled := generation(t, strings.Replace(cutting, "all-balanced", "all-disabled", 1))
	s.nodes.change("n1", labelled("a", "all-disabled"))
	s.await(disabled, "")

	s.nodes.change("n1", labelled("a", "min"))
	s.await(disabled, `ConfigMap gpu/profiles[a]: label nvidia.com/mig.config of node n1: MIG layout "min": no layout has this name, did you mean mine?`)
	if wanted, err := s.policy.Profile(); !errors.Is(err, configs.ErrLayout) || wanted.Name != "a" || wanted.Generation != "" {
		t.Errorf("got %+v, %v; want the name alone", wanted, err)
	}
	s.nodes.change("n1", labelled("b", "min")) // Nothing is cut there.
	s.await(generation(t, four), "")
	s.nodes.change("n1", labelled("a", "all-balanced"))
	s.await(balanced, "")
	s.nodes.change("n1", labelled("a", "mine"))
	mine, err := configs.Documents{"a": "mig: {manage: true, config: mine}\n", "layouts": layouts}.Select("", "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.await(mine.Generation, "")
	if s.stop(); s.nodes.lists != 1 || s.nodes.opened != 1 {
		t.Errorf("%d lists of the node, %d watches", s.nodes.lists, s.nodes.opened)
	}
}

// TestReplaced hears of each Node of the name once, also of one that was made
// anew while nobody watched.
func TestReplaced(t *testing.T) {
	s := newSite(t, nil)
	heard := make(chan struct{}, 10)
	s.policy.Labels.Replaced = func() { heard <- struct{}{} }
	node := func(uid types.UID, profile string) runtime.Object {
		node := fakeNode("n1", profile).(*metav1.PartialObjectMetadata)
		node.UID = uid
		return node
	}
	s.maps.change("profiles", fakeConfigMap(map[string]string{"a": four, "b": ten}))
	s.nodes.change("n1", node("1", "a"))
	s.run()
	<-heard
	s.await(generation(t, four), "")
	s.nodes.change("n1", node("1", "b"))
	s.await(generation(t, ten), "")
	s.nodes.change("n1", nil)
	s.await(generation(t, ten), "not there")
	s.nodes.change("n1", node("2", "b"))
	<-heard
	s.nodes.setAway(errors.New("connection refused"))
	s.nodes.change("n1", nil)
	s.nodes.change("n1", node("3", "a"))
	s.nodes.expire()
	s.nodes.setAway(nil)
	<-heard
	s.await(generation(t, four), "")
	s.nodes.drop()
	s.nodes.change("n1", node("3", "b"))
	s.await(generation(t, ten), "")
	if len(heard) > 0 {
		t.Errorf("heard of a Node %d times more", len(heard))
	}
}

// TestFileAndMIGLabel has a profile of a file wait for the label where it is of
// consequence, and nowhere else.
func TestFileAndMIGLabel(t *testing.T) {
	nodes := newFakeServer()
	log := slog.New(slog.DiscardHandler)
	f := &File{Path: filepath.Join(t.TempDir(), "p.yaml")}
	f.Labels = newLabels("n1", labelName, log, func(into sink) *feed { return nodes.feed("node n1", into, log) })
	started, err := configs.Parse("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	f.Started = started.Process
	write(t, f.Path, four)
	if _, err := f.Profile(); err != nil {
		t.Error(err)
	}
	write(t, f.Path, cutting)
	if _, err := f.Profile(); !errors.Is(err, configs.ErrPending) {
		t.Errorf("%v is not pending", err)
	}
	next := follow(t, f)
	next()
	for _, layout := range []string{"all-disabled", "all-1g.5gb"} {
		nodes.change("n1", labelled("", layout))
		for {
			if selected, err := f.Profile(); err == nil && selected.Profile.MIG.Name == layout && selected.Layout == layout {
				break
			}
			next()
		}
	}
}

// TestKeepsTheLayout has a profile come back with the layout that the label had
// chosen, so that a reboot without an API server cuts nothing otherwise.
func TestKeepsTheLayout(t *testing.T) {
	selected, err := configs.Documents{"a": cutting, "layouts": layouts}.Select("d", "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	if selected, err = selected.SelectMIG("mine"); err != nil {
		t.Fatal(err)
	}
	store := &fakeStore{saved: make(chan struct{}, 10)}
	k := newKeeper(t, store, nil)
	k.Keep(selected)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if got, ok := newKeeper(t, store, nil).Kept(); !ok || got.Generation != selected.Generation || got.Profile.MIG.Name != "mine" {
		t.Errorf("kept %+v, want %+v", got, selected)
	}
	store.stored.Layout = "gone"
	if got, ok := newKeeper(t, store, nil).Kept(); ok {
		t.Errorf("kept %+v with a layout that is none", got)
	}
}
