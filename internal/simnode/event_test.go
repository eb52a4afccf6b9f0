package simnode_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

func TestEventSetWait(t *testing.T) {
	const whole = nvml.WholeBoard
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
		{"lost board", func(t *testing.T, n *simnode.Node, _ nvml.EventSet) {
			must(t, n.Lose(1))
		}, nvml.GPUIsLost, time.Second},
		{"pulled board", func(t *testing.T, n *simnode.Node, _ nvml.EventSet) {
			must(t, n.Remove(1))
		}, nvml.GPUIsLost, time.Second},
		{"reset board", func(t *testing.T, n *simnode.Node, _ nvml.EventSet) {
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
					<-time.After(time.Second)
					test.do(t, node, set)
				}()
				_, err := node.EventSetWait(set, 5*time.Second)
				if took := time.Since(began); returned(err) != test.want || took != test.took {
					t.Errorf("%v after %v, want %s after %v", err, took, test.want, test.took)
				}
			})
		})
	}
}

func TestDeviceRegisterEvents(t *testing.T) {
	node := open(t, "t4")
	device, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	set, err := node.EventSetCreate()
	must(t, err)
	if err := node.DeviceRegisterEvents(device, 1<<40, set); returned(err) != nvml.NotSupported {
		t.Errorf("types that there are not: %v", err)
	}
	if err := node.DeviceRegisterEvents(device, nvml.EventXIDCritical, set+1); returned(err) != nvml.InvalidArgument {
		t.Errorf("set that there is not: %v", err)
	}
	must(t, node.DeviceRegisterEvents(device, nvml.EventXIDCritical, set))
	must(t, node.ECC(0, true))
	if event, err := node.EventSetWait(set, 0); returned(err) != nvml.Timeout {
		t.Errorf("event of a type that nobody asked for: %+v, %v", event, err)
	}
	if err := node.EventSetFree(set + 1); returned(err) != nvml.InvalidArgument {
		t.Errorf("freed a set that there is not: %v", err)
	}
}

// TestScript holds which calls a script takes, and that a slow call holds up no
// other.
func TestScript(t *testing.T) {
	t.Run("some calls", func(t *testing.T) {
		node := open(t, "t4")
		end := node.Script("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Skip: 2, Times: 2})
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
	t.Run("two scripts in turn", func(t *testing.T) {
		node := open(t, "t4")
		node.Script("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
		end := node.Script("DeviceGetCount", simnode.Fault{Return: nvml.NoPermission})
		for i, want := range []nvml.Return{nvml.Unknown, nvml.NoPermission, nvml.NoPermission} {
			if _, err := node.DeviceGetCount(); returned(err) != want {
				t.Errorf("call %d returned %v, want %s", i, err, want)
			}
		}
		end()
		if _, err := node.DeviceGetCount(); err != nil {
			t.Errorf("after the script ended: %v", err)
		}
	})
	t.Run("board that moves", func(t *testing.T) {
		node := open(t, "a30x4")
		_, err := node.ScriptGPU(2, "DeviceGetHandleByIndex", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		must(t, node.Remove(0))
		for gpu, want := range []nvml.Return{0, nvml.Unknown, 0} {
			if _, err := node.DeviceGetHandleByIndex(gpu); returned(err) != want {
				t.Errorf("GPU %d returned %v, want %s", gpu, err, want)
			}
		}
		if _, err := node.ScriptGPU(3, "DeviceGetName", simnode.Fault{}); err == nil {
			t.Error("a script for a board that there is not")
		}
	})
	t.Run("slow call", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			node := open(t, "t4")
			node.Script("DeviceGetCount", simnode.Fault{Delay: time.Minute})
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
			if _, err := node.DeviceGetHandleByIndex(0); err != nil || time.Since(began) != 0 {
				t.Errorf("another call took %v, %v", time.Since(began), err)
			}
			if took := (<-ended).Sub(began); took != time.Minute {
				t.Errorf("the slow call took %v", took)
			}
		})
	})
}

// TestOldHandles holds that handles of before a reset are dead, and those of
// partitions that are gone are no handles.
func TestOldHandles(t *testing.T) {
	node := open(t, "h200+all-1g.35gb")
	board, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	partition, err := node.DeviceGetMigDeviceHandleByIndex(board, 0)
	must(t, err)
	must(t, node.DestroyComputeInstance(0, 1, 0))
	if _, err := node.DeviceGetUUID(partition); returned(err) != nvml.InvalidArgument {
		t.Errorf("a partition that is gone: %v", err)
	}
	partition, err = node.DeviceGetMigDeviceHandleByIndex(board, 1)
	must(t, err)
	must(t, node.Heal(0))
	for _, old := range []nvml.Device{board, partition} {
		if _, err := node.DeviceGetUUID(old); returned(err) != nvml.GPUIsLost {
			t.Errorf("a handle of before the reset: %v", err)
		}
	}
	board, err = node.DeviceGetHandleByIndex(0)
	must(t, err)
	if partition, err = node.DeviceGetMigDeviceHandleByIndex(board, 1); err != nil {
		t.Errorf("a handle of after the reset: %v", err)
	}
	if _, err := node.DeviceGetUUID(partition); err != nil {
		t.Errorf("a handle of after the reset: %v", err)
	}
}

// TestSenseless holds that calls that make no sense are answered.
func TestSenseless(t *testing.T) {
	node := open(t, "h200+all-1g.35gb")
	board, err := node.DeviceGetHandleByIndex(0)
	must(t, err)
	partition, err := node.DeviceGetMigDeviceHandleByIndex(board, 0)
	must(t, err)
	number := func(_ any, err error) error { return err }
	tests := []struct {
		name string
		err  error
		want nvml.Return
	}{
		{"handle nobody has", number(node.DeviceGetUUID(12345)), nvml.InvalidArgument},
		{"index too high", number(node.DeviceGetHandleByIndex(1)), nvml.InvalidArgument},
		{"index below 0", number(node.DeviceGetHandleByIndex(-1)), nvml.InvalidArgument},
		{"minor of a partition", number(node.DeviceGetMinorNumber(partition)), nvml.NotSupported},
		{"temperature of a partition", number(node.DeviceGetTemperature(partition)), nvml.NotSupported},
		{"events of a partition", number(node.DeviceGetSupportedEventTypes(partition)), nvml.NotSupported},
		{"instance of a board", number(node.DeviceGetGpuInstanceId(board)), nvml.InvalidArgument},
		{"compute instance of a board", number(node.DeviceGetComputeInstanceId(board)), nvml.InvalidArgument},
		{"partition at a hole", number(node.DeviceGetMigDeviceHandleByIndex(board, 4)), nvml.NotFound},
		{"partition past the maximum", number(node.DeviceGetMigDeviceHandleByIndex(board, 7)), nvml.InvalidArgument},
		{"instance there is not", number(node.DeviceGetGpuInstanceById(board, 99)), nvml.NotFound},
		{"instance handle nobody has", number(node.GpuInstanceGetInfo(12345)), nvml.InvalidArgument},
		{"compute instance handle nobody has", number(node.ComputeInstanceGetInfo(12345)), nvml.InvalidArgument},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if returned(test.err) != test.want {
				t.Errorf("returned %v, want %s", test.err, test.want)
			}
		})
	}
}
