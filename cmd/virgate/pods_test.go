package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/sharing"
)

func TestContainersByID(t *testing.T) {
	got := byID([]policy.Container{
		{Namespace: "ns", Pod: "one", UID: "u", Name: "main", ID: "containerd://5d41"},
		{Namespace: "ns", Pod: "two", UID: "v", Name: "init", ID: "cri-o://6e52"},
	})
	want := map[string]sharing.Container{
		"5d41": {Namespace: "ns", Pod: "one", Name: "main"}, "6e52": {Namespace: "ns", Pod: "two", Name: "init"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("containers (-want +got):\n%s", diff)
	}
}
