package nvml_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestUnlisted checks that a GPU that the kernel's driver has but NVML does not list is reported by its address.
func TestUnlisted(t *testing.T) {
	for _, test := range []struct{ world, want string }{
		{"", ""},
		{"unlisted=1", "the driver lists 3 of the 4 GPUs that it is bound to, without 00000000:37:00.0"},
		{"unlisted=2", "the driver lists 2 of the 4 GPUs that it is bound to, without 00000000:27:00.0, 00000000:37:00.0"},
		{"unlisted=4", "the driver lists 0 of the 4 GPUs that it is bound to, without 00000000:07:00.0, 00000000:17:00.0, 00000000:27:00.0, 00000000:37:00.0"},
	} {
		synctest.Test(t, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			must(t, sim.SetWorld(test.world))
			w := watchWith(t, sim, nvml.Options{Kernel: sim})
			if got := w.Unlisted(); got != test.want {
				t.Errorf("world %q: %q, want %q", test.world, got, test.want)
			}
			after(3 * rescan) // Probes do not forget it.
			if got := w.Unlisted(); got != test.want || w.changes != 1 {
				t.Errorf("world %q: later %q, after %d changes", test.world, got, w.changes)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		must(t, sim.SetWorld("unlisted=1"))
		end, err := sim.InjectGPUFault(0, "DeviceGetUUID", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		if got := w.Unlisted(); !strings.HasSuffix(got, "without some of 00000000:07:00.0, 00000000:37:00.0") {
			t.Errorf("beside one that cannot be read: %q", got)
		}
		end()
		must(t, sim.Remove(3))
		after(2 * rescan)
		if got := w.Unlisted(); got != "the driver lists 2 of the 3 GPUs that it is bound to, without 00000000:27:00.0" {
			t.Errorf("when it was taken out and another one failed: %q", got)
		}
		for range 3 {
			must(t, sim.Remove(0))
		}
		after(2 * rescan)
		if got := w.Unlisted(); got != "" {
			t.Errorf("when all were taken out: %q", got)
		}
	})
}

// TestNodesLost checks that a container that can no longer open the driver ends, and reports no GPU as faulty.
func TestNodesLost(t *testing.T) {
	const want = "this container cannot open the driver's control node: it has lost its device nodes, as after systemctl daemon-reload, or was never given any; a new one is needed (open /dev/nvidiactl: operation not permitted)"
	all := func(sim *simnode.Node, call string) {
		for gpu := range sim.GPUs() {
			_, err := sim.InjectGPUFault(gpu, call, simnode.Fault{Return: nvml.Unknown})
			if err != nil {
				panic(err)
			}
		}
	}
	for _, test := range []struct {
		name, world string
		do          func(*simnode.Node)
		ends        bool
		// ill is the number of faulty GPUs if the program does not end.
		ill int
	}{
		{"nothing happens", "", func(*simnode.Node) {}, false, 0},
		{"what is open stays open", "", (*simnode.Node).LoseNodes, false, 0},
		{"a new session", "", func(sim *simnode.Node) {
			sim.LoseNodes()
			sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
		}, true, 0},
		{"every GPU fails", "", func(sim *simnode.Node) {
			sim.LoseNodes()
			all(sim, "DeviceGetMemoryInfo")
		}, true, 0},
		{"no GPU can be looked up again", "", func(sim *simnode.Node) {
			sim.LoseNodes()
			all(sim, "DeviceGetUUID")
		}, true, 0},
		{"every GPU fails, and the nodes are there", "", func(sim *simnode.Node) { all(sim, "DeviceGetMemoryInfo") }, false, 4},
		{"one GPU fails", "", func(sim *simnode.Node) {
			sim.LoseNodes()
			_, err := sim.InjectGPUFault(1, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
			if err != nil {
				panic(err)
			}
		}, false, 1},
		{"a driver that is gone, and the nodes are there", "", func(sim *simnode.Node) {
			sim.InjectFault("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
			sim.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded, Times: 2})
		}, false, 0},
		{"no nodes from the start", "no-nodes", func(*simnode.Node) {}, true, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				must(t, sim.SetWorld(test.world))
				node := nvml.NewNode(sim, nvml.Options{Kernel: sim, Rescan: rescan})
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- node.Watch(ctx, func() {}) }()
				synctest.Wait()
				test.do(sim)
				after(2 * rescan)
				select {
				case err := <-ended:
					if !test.ends || err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("it ended: %v, want %s", err, want)
					}
				default:
					if test.ends {
						t.Error("it has not ended")
					}
				}
				ill := 0
				gpus, _ := node.Inventory()
				for _, gpu := range gpus {
					if !gpu.Health.Healthy() {
						ill++
					}
				}
				if ill != test.ill {
					t.Errorf("%d GPUs have a fault, want %d", ill, test.ill)
				}
				cancel()
				after(time.Second)
			})
		})
	}
}

// stuckKernel answers only when the test sends an answer.
type stuckKernel struct {
	*simnode.Node
	opens  int
	answer chan error
}

func (k *stuckKernel) OpenControl() error {
	k.opens++
	return <-k.answer
}

// TestControlNodeHangs checks that a control node that does not open has no effect, and is opened once.
func TestControlNodeHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		kernel := &stuckKernel{sim, 0, make(chan error)}
		w := watchWith(t, sim, nvml.Options{Kernel: kernel})
		defer close(kernel.answer)
		_, err := sim.InjectGPUFault(0, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
		must(t, err)
		after(5 * rescan)
		w.expect("while it hangs", map[string]string{"0": "memory query: UNKNOWN"})
		if kernel.opens != 1 {
			t.Errorf("opened %d times", kernel.opens)
		}
	})
}

// TestNodesLostInAPause checks that the control node is not opened while the driver must stay closed.
func TestNodesLostInAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "a30x4")
		w := watchWith(t, sim, nvml.Options{Kernel: sim})
		var gpus []string
		for _, gpu := range sim.GPUs() {
			gpus = append(gpus, gpu.UUID)
			_, err := w.Release(t.Context(), gpu.UUID)
			must(t, err)
		}
		w.Pause(gpus)
		sim.LoseNodes()
		after(3 * rescan)
		must(t, w.stop())
	})
}
