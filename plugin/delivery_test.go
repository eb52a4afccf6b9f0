package plugin

import (
	"testing"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// namedStream is told from others by its name.
type namedStream struct {
	grpc.ServerStream
	name string
}

// TestDeliveries asks again and again what the open stream was given.
func TestDeliveries(t *testing.T) {
	first, second := &namedStream{name: "first"}, &namedStream{name: "second"}
	older := &generation{response: &api.ListAndWatchResponse{}}
	newest := &generation{response: &api.ListAndWatchResponse{}}
	r := &running{server: &server{name: "gpu"}}
	r.current.Store(newest)
	for _, step := range []struct {
		name       string
		last       *delivery
		sent, lost bool
	}{
		{"no stream yet", nil, false, true},
		{"one has opened", &delivery{&generation{}, first}, false, true},
		{"it was given a list", &delivery{older, first}, false, false},
		{"it was given the newest", &delivery{newest, first}, true, false},
		{"the same, repeated", &delivery{newest.repeated(), first}, true, false},
		{"replaced since", &delivery{newest, second}, true, true},
		{"asked again", &delivery{newest, second}, true, false},
		{"lost", nil, false, true},
		{"still lost", nil, false, true},
		{"back again", &delivery{older, second}, false, true},
		{"and given the newest", &delivery{newest, second}, true, false},
	} {
		r.sent.Store(step.last)
		into := Calls{Sent: map[string]bool{}, Lost: map[string]bool{}}
		r.deliveries(into)
		if sent, lost := into.Sent["gpu"], into.Lost["gpu"]; sent != step.sent || lost != step.lost {
			t.Errorf("%s: sent %t, lost %t", step.name, sent, lost)
		}
	}
}
