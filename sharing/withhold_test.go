package sharing

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWithhold(t *testing.T) {
	boards := node(2)
	boards[1].Fault = "XID 79"
	plan := NewPlan(boards, defaults(Share{Resource: "nvidia.com/gpu", Replicas: 2}))
	before := NewPlan(boards, defaults(Share{Resource: "nvidia.com/gpu", Replicas: 2}))

	got := plan.Withhold(map[string]string{boards[0].UUID: "no driver", boards[1].UUID: "no driver", "GPU-gone": "no driver"})
	if diff := cmp.Diff(map[string]string{boards[0].UUID: "no driver", boards[1].UUID: "XID 79"}, got.Faults); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"nvidia.com/gpu: 0×2! 1×2!"}, show(got)); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	if healthy := got.Resources[0].Healthy(); healthy != 0 {
		t.Errorf("%d devices are healthy", healthy)
	}
	if diff := cmp.Diff(before, plan); diff != "" {
		t.Errorf("the plan was modified (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(before, plan.Withhold(nil)); diff != "" {
		t.Errorf("nothing withheld (-plan +got):\n%s", diff)
	}
	if one := plan.Withhold(map[string]string{boards[0].UUID: "no driver"}).Withhold(map[string]string{}); one.Faults[boards[0].UUID] == "" {
		t.Error("an earlier reason is lost")
	}
}
