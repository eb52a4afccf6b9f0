package simnode_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/test/nvmltest"
)

func TestEventSetWait(t *testing.T) {
	const whole = nvml.WholeGPU
	tests := []struct {
		name string
		// do happens one second after the wait has begun.
		do   func(*testing.T, *simnode.Node, nvml.EventSet)
		want nvml.Return
		took time.Duration
	}{
		{"nothing", func(*testing.T, *simnode.Node, nvml.EventSet) {}, nvml.Timeout, 5 * time.Second},
		{"event", func(t *testing.T, n *simnode.Node, _ nvml.EventSet) {
			must(t, n.XID(1, 79, whole, whole))
		}, nvml.Success, time.Second},
		{"lost GPU", func(t *testing.T, n *simnode.Node, _ nvml.EventSet) {
			must(t, n.Lose(1))
		}, nvml.GPUIsLost, time.Second},
		{"removed GPU", func(t *testing.T, n *simnode.Node, _ nvml.EventSet) {
			must(t, n.Remove(1))
		}, nvml.GPUIsLost, time.Second},
		{"reset GPU", func(t *testing.T, n *simnode.Node, _ nvml.EventSet) {
			must(t, n.Heal(1))
			must(t, n.XID(1, 79, whole, whole))
		}, nvml.Timeout, 5 * time.Second},
		{"freed set", func(t *testing.T, n *simnode.Node, set nvml.EventSet) {
			must(t, n.EventSetFree(set))
		}, nvml.InvalidArgument, time.Second},
		{"closed driver", func(t *testing.T, n *simnode.Node, _ nvml.EventSet) {
			must(t, n.Shutdown())
		}, nvml.InvalidArgument, time.Second},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				node := open(t, "a30x4")
				set := listen(t, node)
				began := time.Now()
				go func() {
					pass(time.Second)
					test.do(t, node, set)
				}()
				_, err := node.EventSetWait(set, 5*time.Second)
				if took := elapsed(began); returned(err) != test.want || took != test.took {
					t.Errorf("%v after %v, want %s after %v", err, took, test.want, test.took)
				}
			})
		})
	}
}

// elapsed is the bubble's time since began.
func elapsed(began time.Time) time.Duration {
	return time.Since(began) //nolint:forbidigo // in a synctest bubble: the time is simulated
}

// pass lets the bubble's time pass.
func pass(d time.Duration) {
	<-time.After(d) //nolint:forbidigo // in a synctest bubble: the time is simulated
}

func TestDeviceRegisterEvents(t *testing.T) {
	node := open(t, "t4")
	device, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	set, err := node.EventSetCreate()
	must(t, err)
	if err := node.DeviceRegisterEvents(device, 1<<40, set); returned(err) != nvml.NotSupported {
		t.Errorf("unsupported types: %v", err)
	}
	if err := node.DeviceRegisterEvents(device, nvml.EventXIDCritical, set+1); returned(err) != nvml.InvalidArgument {
		t.Errorf("unknown set: %v", err)
	}
	must(t, node.DeviceRegisterEvents(device, nvml.EventXIDCritical, set))
	must(t, node.ECC(0, true))
	if event, err := node.EventSetWait(set, 0); returned(err) != nvml.Timeout {
		t.Errorf("event of a type that is not registered: %+v, %v", event, err)
	}
	if err := node.EventSetFree(set + 1); returned(err) != nvml.InvalidArgument {
		t.Errorf("freed a unknown set: %v", err)
	}
}

// TestInjectFault checks which calls a fault hits, and that a slow call does not delay
// others.
func TestInjectFault(t *testing.T) {
	t.Run("some calls", func(t *testing.T) {
		node := open(t, "t4")
		end := node.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Skip: 2, Times: 2})
		var got []nvml.Return
		for range 6 {
			_, err := node.DeviceGetCount()
			got = append(got, returned(err))
		}
		for i, want := range []nvml.Return{0, 0, nvml.Unknown, nvml.Unknown, 0, 0} {
			if got[i] != want {
				t.Errorf("call %d returned %s, want %s", i, got[i], want)
			}
		}
		end()
		end()
		if calls := node.Calls("DeviceGetCount"); calls != 6 {
			t.Errorf("%d calls counted", calls)
		}
	})
	t.Run("two faults in turn", func(t *testing.T) {
		node := open(t, "t4")
		node.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
		end := node.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.NoPermission})
		for i, want := range []nvml.Return{nvml.Unknown, nvml.NoPermission, nvml.NoPermission} {
			if _, err := node.DeviceGetCount(); returned(err) != want {
				t.Errorf("call %d returned %v, want %s", i, err, want)
			}
		}
		end()
		if _, err := node.DeviceGetCount(); err != nil {
			t.Errorf("after the fault ended: %v", err)
		}
	})
	t.Run("GPU that moves", func(t *testing.T) {
		node := open(t, "a30x4")
		_, err := node.InjectGPUFault(2, "DeviceGetHandleByIndex", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		must(t, node.Remove(0))
		for gpu, want := range []nvml.Return{0, nvml.Unknown, 0} {
			if _, err := node.DeviceGetHandleByIndex(gpu); returned(err) != want {
				t.Errorf("GPU %d returned %v, want %s", gpu, err, want)
			}
		}
		if _, err := node.InjectGPUFault(3, "DeviceGetName", simnode.Fault{}); err == nil {
			t.Error("injected a fault into a missing GPU")
		}
	})
	t.Run("slow call", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			node := open(t, "t4")
			node.InjectFault("DeviceGetCount", simnode.Fault{Delay: time.Minute})
			ended := make(chan time.Time)
			began := time.Now()
			go func() {
				_, err := node.DeviceGetCount()
				if err != nil {
					t.Error(err)
				}
				ended <- time.Now()
			}()
			synctest.Wait()
			if _, err := node.DeviceGetHandleByIndex(0); err != nil || elapsed(began) != 0 {
				t.Errorf("another call took %v, %v", elapsed(began), err)
			}
			if took := (<-ended).Sub(began); took != time.Minute {
				t.Errorf("the slow call took %v", took)
			}
		})
	})
}

// TestOldHandles checks that handles from before a reset are GPU_IS_LOST, and that handles of destroyed
// partitions are invalid.
func TestOldHandles(t *testing.T) {
	node := open(t, "h200+all-1g.35gb")
	gpu, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	partition, err := node.DeviceGetMigDeviceHandleByIndex(gpu, 0)
	must(t, err)
	must(t, nvmltest.DestroyComputeInstance(node, 0, 1, 0))
	if _, err := node.DeviceGetUUID(partition); returned(err) != nvml.InvalidArgument {
		t.Errorf("a destroyed partition: %v", err)
	}
	partition, err = node.DeviceGetMigDeviceHandleByIndex(gpu, 1)
	must(t, err)
	instance, err := node.DeviceGetGpuInstanceById(gpu, 2)
	must(t, err)
	must(t, node.Heal(0))
	for _, old := range []nvml.Device{gpu, partition} {
		if _, err := node.DeviceGetUUID(old); returned(err) != nvml.GPUIsLost {
			t.Errorf("a handle from before the reset: %v", err)
		}
	}
	gpu, err = node.DeviceGetHandleByIndex(0)
	must(t, err)
	if _, err := node.DeviceGetMigDeviceHandleByIndex(gpu, 1); returned(err) != nvml.NotFound {
		t.Errorf("a partition after the reset: %v", err)
	}
	if _, err := node.GpuInstanceGetInfo(instance); returned(err) != nvml.InvalidArgument {
		t.Errorf("an instance from before the reset: %v", err)
	}
	if mode, err := node.DeviceGetMigMode(gpu); !mode.Current || err != nil {
		t.Errorf("MIG mode %+v after the reset, %v", mode, err)
	}
}

// TestUnsupportedCalls checks the return codes of calls with wrong arguments.
func TestUnsupportedCalls(t *testing.T) {
	node := open(t, "h200+all-1g.35gb")
	gpu, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	partition, err := node.DeviceGetMigDeviceHandleByIndex(gpu, 0)
	must(t, err)
	number := func(_ any, err error) error { return err }
	tests := []struct {
		name string
		err  error
		want nvml.Return
	}{
		{"unknown handle", number(node.DeviceGetUUID(12345)), nvml.InvalidArgument},
		{"index too high", number(node.DeviceGetHandleByIndex(1)), nvml.InvalidArgument},
		{"index below 0", number(node.DeviceGetHandleByIndex(-1)), nvml.InvalidArgument},
		{"minor of a partition", number(node.DeviceGetMinorNumber(partition)), nvml.NotSupported},
		{"temperature of a partition", number(node.DeviceGetTemperature(partition)), nvml.NotSupported},
		{"events of a partition", number(node.DeviceGetSupportedEventTypes(partition)), nvml.NotSupported},
		{"instance of a GPU", number(node.DeviceGetGpuInstanceId(gpu)), nvml.InvalidArgument},
		{"compute instance of a GPU", number(node.DeviceGetComputeInstanceId(gpu)), nvml.InvalidArgument},
		{"index without a partition", number(node.DeviceGetMigDeviceHandleByIndex(gpu, 4)), nvml.NotFound},
		{"partition past the maximum", number(node.DeviceGetMigDeviceHandleByIndex(gpu, 7)), nvml.InvalidArgument},
		{"unknown instance", number(node.DeviceGetGpuInstanceById(gpu, 99)), nvml.NotFound},
		{"instance unknown handle", number(node.GpuInstanceGetInfo(12345)), nvml.InvalidArgument},
		{"compute instance unknown handle", number(node.ComputeInstanceGetInfo(12345)), nvml.InvalidArgument},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if returned(test.err) != test.want {
				t.Errorf("returned %v, want %s", test.err, test.want)
			}
		})
	}
}
