package configsource

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/kube"
)

// FuzzParseConfigMapName checks that an accepted name has both parts, and gives the same text.
func FuzzParseConfigMapName(f *testing.F) {
	for _, text := range []string{"gpu/profiles", "/", "a/", "/b", "a", "a/b/c", "", "a/b\n", "../x"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		namespace, name, err := ParseConfigMapName(text)
		if (err != nil) != (namespace == "" || name == "") || err == nil && namespace+"/"+name != text {
			t.Errorf("%q is %q and %q, %v", text, namespace, name, err)
		}
	})
}

// FuzzChoose checks that the choice exists, is the empty document or is an error, and that the order of names
// does not matter.
func FuzzChoose(f *testing.F) {
	f.Add("", "", "named,single,empty", "a default")
	f.Add("a", "", "", "a b")
	f.Add("missing", "b", "single", "a b")
	f.Add("", "", "named", "")
	f.Add("\x1b", "\xff", "empty", "\n\t\u202e")
	f.Fuzz(func(t *testing.T, label, standard, fallbacks, names string) {
		parsed, err := ParseFallbacks(fallbacks)
		if err != nil {
			return
		}
		criteria := Criteria{LabelName: "l", Label: label, Default: standard, Fallbacks: parsed, Names: strings.Fields(names)}
		chosen, err := Choose(criteria)
		name := chosen.Name
		if err == nil && !slices.Contains(criteria.Names, name) && (name != "" || !slices.Contains(parsed, FallbackEmpty)) {
			t.Errorf("%+v: chose %q", criteria, name)
		}
		if err == nil && label != "" && name != label {
			t.Errorf("%+v: chose %q against the label", criteria, name)
		}
		slices.Reverse(criteria.Names)
		if other, errOther := Choose(criteria); other.Name != name || (err == nil) != (errOther == nil) || err != nil && err.Error() != errOther.Error() {
			t.Errorf("%+v: %q, %v; the other way round %q, %v", criteria, name, err, other.Name, errOther)
		}
	})
}

// FuzzRestore checks that a stored profile is restored unchanged, or with an error and no profile.
func FuzzRestore(f *testing.F) {
	managed := "version: v1\nmig: {manage: true, config: all-balanced}\nflags: {migStrategy: mixed}\n"
	f.Add("a", "a", managed, "all-1g.5gb")
	f.Add("", "", "apiVersion: v1\nkind: ConfigMap\ndata: {a: '', b: ''}", "")
	f.Add("b", "", "apiVersion: v1\nkind: ConfigMap\ndata: {a: '', b: ''}", "")
	f.Add("a", "b", "", "")
	f.Fuzz(func(t *testing.T, name, key, text, layout string) {
		stored := configs.SelectedProfile{Name: name, Source: "s", Layout: layout, Documents: map[string]string{key: text}}
		selected, err := Restore(stored, nil)
		if err != nil {
			if selected.Source != "" || selected.Documents != nil {
				t.Errorf("%+v with %v", selected, err)
			}
			return
		}
		again, err := Restore(selected, nil)
		if err != nil || again.Generation != selected.Generation || !same(again, selected) {
			t.Errorf("restored as %+v, and that as %+v, %v", selected, again, err)
		}
	})
}

// FuzzEvents checks that after a watch with any objects, the ConfigMap and the pods can still be read.
func FuzzEvents(f *testing.F) {
	add := func(kind string, object interface{ Marshal() ([]byte, error) }) {
		data, err := object.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(kind, data)
	}
	for _, kind := range []watch.EventType{watch.Added, watch.Modified, watch.Deleted, watch.Bookmark, watch.Error, "NEW"} {
		add(string(kind), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: "profiles", ResourceVersion: "7"},
			Data:       map[string]string{"a": "version: v1"}, BinaryData: map[string][]byte{"b": {0xff}},
		})
		add(string(kind), fakePod("u", "pod", map[string]string{"main": "containerd://1", "none": ""}))
		add(string(kind), &metav1.Status{Code: 410, Message: "\x1b"})
	}
	log := slog.New(slog.DiscardHandler)
	f.Fuzz(func(t *testing.T, kind string, data []byte) {
		var configMap corev1.ConfigMap
		var pod corev1.Pod
		var status metav1.Status
		var objects []runtime.Object
		for _, object := range []interface {
			runtime.Object
			Unmarshal([]byte) error
		}{&configMap, &pod, &status} {
			if object.Unmarshal(data) == nil {
				objects = append(objects, object)
			}
		}
		server := newFakeServer()
		documents := NewConfigMap(server, "gpu", "profiles", log)
		documents.store.changed = func() {}
		pods := NewPods(server, "n", log)
		pods.store.changed = func() {}
		for _, object := range objects {
			for _, into := range []kube.Store{documents.store, pods.store} {
				change := map[watch.EventType]func(any){watch.Added: into.Update, watch.Modified: into.Update, watch.Deleted: into.Delete}[watch.EventType(kind)]
				if change == nil {
					change = func(object any) { into.Replace([]any{object}, "7") }
				}
				change(object)
			}
		}
		if _, err := documents.Documents(); err != nil && !errors.Is(err, configs.ErrPending) && !errors.Is(err, errNotThere) {
			t.Errorf("the ConfigMap: %v", err)
		}
		containers, err := pods.Containers()
		if err != nil && !errors.Is(err, configs.ErrPending) {
			t.Errorf("the pods: %v", err)
		}
		if c, found := containers[""]; found {
			t.Errorf("a container without ID: %+v", c)
		}
	})
}
