package sharing

import "testing"

func TestResourceStrategy(t *testing.T) {
	board := func(replicas int) Unit { return Unit{ID: "GPU-0", GPU: "GPU-0", Replicas: replicas} }
	part := func(replicas int) Unit { return Unit{ID: "MIG-0", GPU: "GPU-0", Replicas: replicas} }
	for _, test := range []struct {
		name     string
		units    []Unit
		want     string
		replicas int
	}{
		{"nothing", nil, "", 0},
		{"exclusive", []Unit{board(1), board(1)}, "exclusive", 1},
		{"time-slicing", []Unit{board(2)}, "time-slicing", 2},
		{"mig", []Unit{part(1)}, "mig", 1},
		{"mig+time-slicing", []Unit{part(3)}, "mig+time-slicing", 3},
		{"mixture", []Unit{board(4), board(1)}, "exclusive,time-slicing", 4},
		{"everything", []Unit{part(2), part(1), board(9), board(1)}, "exclusive,time-slicing,mig,mig+time-slicing", 9},
	} {
		t.Run(test.name, func(t *testing.T) {
			resource := Resource{Units: test.units}
			if got := resource.Strategy(); got != test.want {
				t.Errorf("Strategy() = %q, want %q", got, test.want)
			}
			if got := resource.Replicas(); got != test.replicas {
				t.Errorf("Replicas() = %d, want %d", got, test.replicas)
			}
		})
	}
}

func TestResourceHealthy(t *testing.T) {
	resource := Resource{Devices: units(t, "A×3 B×2 !A::1 !B::0")}
	if got := resource.Healthy(); got != 3 {
		t.Errorf("Healthy() = %d, want 3", got)
	}
}
