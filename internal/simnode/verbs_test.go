package simnode_test

import (
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// TestDo runs each verb once and checks its effect.
func TestDo(t *testing.T) {
	type arguments = map[string]string
	device := func(t *testing.T, n *simnode.Node, gpu int) nvml.Device {
		d, err := n.DeviceGetHandleByIndex(gpu)
		must(t, err)
		return d
	}
	tests := []struct {
		verb      string
		arguments arguments
		check     func(t *testing.T, n *simnode.Node, events []nvml.Event)
	}{
		{"xid", arguments{"gpu": "1", "code": "79"}, func(t *testing.T, n *simnode.Node, events []nvml.Event) {
			want := nvml.Event{Device: device(t, n, 1), Type: nvml.EventXIDCritical, Data: 79, GI: nvml.WholeGPU, CI: nvml.WholeGPU}
			if len(events) != 1 || events[0] != want {
				t.Errorf("events %+v, want %+v", events, want)
			}
		}},
		{"xid", arguments{"gpu": "3", "code": "94", "gi": "7", "ci": "0"}, func(t *testing.T, n *simnode.Node, events []nvml.Event) {
			want := nvml.Event{Device: device(t, n, 3), Type: nvml.EventXIDCritical, Data: 94, GI: 7, CI: 0}
			if len(events) != 1 || events[0] != want {
				t.Errorf("events %+v, want %+v", events, want)
			}
		}},
		{"ecc", arguments{"gpu": "0"}, func(t *testing.T, _ *simnode.Node, events []nvml.Event) {
			if len(events) != 1 || events[0].Type != nvml.EventDoubleBitECC {
				t.Errorf("events %+v", events)
			}
		}},
		{"advise", arguments{"gpu": "1", "action": "system-reboot"}, func(t *testing.T, n *simnode.Node, events []nvml.Event) {
			action, err := n.DeviceGetFieldValues(device(t, n, 1), nvml.RecoveryAction)
			if action != nvml.RecoverSystemReboot || err != nil || len(events) != 1 || events[0].Type != nvml.EventRecoveryAction {
				t.Errorf("action %d, %v, events %+v", action, err, events)
			}
		}},
		{"fabric", arguments{"gpu": "1", "state": "3", "status": "999", "summary": "2"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			fabric, err := n.DeviceGetGpuFabricInfo(device(t, n, 1))
			if !errors.Is(err, nvml.NotSupported) { // It is no H100.
				t.Errorf("fabric %+v, %v", fabric, err)
			}
		}},
		{"ready", arguments{"state": "1"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if ready, err := n.SystemGetConfComputeGpusReadyState(); !errors.Is(err, nvml.NotSupported) {
				t.Errorf("ready state %d, %v", ready, err)
			}
		}},
		{"unavailable", arguments{"gpu": "1"}, func(t *testing.T, _ *simnode.Node, events []nvml.Event) {
			if len(events) != 1 || events[0].Type != nvml.EventGPUUnavailable {
				t.Errorf("events %+v", events)
			}
		}},
		{"repair", arguments{"gpu": "1"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if rows, err := n.DeviceGetRemappedRows(device(t, n, 1)); !rows.Pending || err != nil {
				t.Errorf("rows %+v, %v", rows, err)
			}
		}},
		{"slow", arguments{"gpu": "2", "call": "DeviceGetName", "milliseconds": "20"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				if _, err := n.DeviceGetName(device(t, n, 2)); err != nil || elapsed(began) != 20*time.Millisecond {
					t.Errorf("after %v, %v", elapsed(began), err)
				}
			})
		}},
		{"lose", arguments{"gpu": "2"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if _, err := n.DeviceGetHandleByIndex(2); returned(err) != nvml.GPUIsLost {
				t.Errorf("handle: %v", err)
			}
		}},
		{"temperature", arguments{"gpu": "2", "celsius": "95"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if got, err := n.DeviceGetTemperature(device(t, n, 2)); got != 95 || err != nil {
				t.Errorf("%d °C, %v", got, err)
			}
		}},
		{"fail", arguments{"gpu": "2", "call": "DeviceGetName", "return": "NO_PERMISSION", "times": "1"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if _, err := n.DeviceGetName(device(t, n, 1)); err != nil {
				t.Errorf("another GPU: %v", err)
			}
			if _, err := n.DeviceGetName(device(t, n, 2)); returned(err) != nvml.NoPermission {
				t.Errorf("first call: %v", err)
			}
			if _, err := n.DeviceGetName(device(t, n, 2)); err != nil {
				t.Errorf("second call: %v", err)
			}
		}},
		{"fail", arguments{"gpu": "2", "call": "DeviceGetName"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			d := device(t, n, 2)
			if _, err := n.DeviceGetName(d); returned(err) != nvml.Unknown {
				t.Errorf("before the reset: %v", err)
			}
			must(t, n.Do("heal", arguments{"gpu": "2"}))
			if _, err := n.DeviceGetName(d); returned(err) != nvml.GPUIsLost {
				t.Errorf("with the old handle: %v", err)
			}
			if _, err := n.DeviceGetName(device(t, n, 2)); err != nil {
				t.Errorf("after the reset: %v", err)
			}
		}},
		{"process-add", arguments{"gpu": "1", "pid": "4711", "bytes": "1073741824"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			memory, err := n.DeviceGetMemoryInfo(device(t, n, 1))
			must(t, err)
			processes, err := n.DeviceGetComputeRunningProcesses(device(t, n, 1))
			must(t, err)
			if len(processes) != 1 || processes[0] != (nvml.Process{PID: 4711, Memory: 1 << 30}) || memory.Used != 1<<30 {
				t.Errorf("processes %v use %d bytes", processes, memory.Used)
			}
			must(t, n.Do("process-remove", arguments{"gpu": "1", "pid": "4711"}))
			if processes, _ := n.DeviceGetComputeRunningProcesses(device(t, n, 1)); len(processes) != 0 {
				t.Errorf("processes left: %v", processes)
			}
		}},
		{"process-add", arguments{"gpu": "1", "pid": "4711", "sm": "30", "container": "ns/one/main"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			must(t, n.Do("process-work", arguments{"gpu": "1", "pid": "4711", "sm": "45"}))
			must(t, n.TakeSample(1))
			samples, err := n.DeviceGetProcessUtilization(device(t, n, 1), 0)
			if last := len(samples) - 1; err != nil || samples[last].PID != 4711 || samples[last].SM != 45 {
				t.Errorf("samples %+v, %v", samples, err)
			}
			if rates, err := n.DeviceGetUtilizationRates(device(t, n, 1)); rates.GPU != 45 || err != nil {
				t.Errorf("%+v, %v", rates, err)
			}
			containers, err := n.Containers()
			must(t, err)
			cgroup, err := fs.ReadFile(n.Proc(), "4711/cgroup")
			must(t, err)
			for id, container := range containers {
				if container != (sharing.Container{Namespace: "ns", Pod: "one", Name: "main"}) || !strings.Contains(string(cgroup), id) {
					t.Errorf("container %+v with ID %s, cgroup %s", container, id, cgroup)
				}
			}
			must(t, n.Do("process-remove", arguments{"gpu": "1", "pid": "4711"}))
			if _, err := fs.ReadFile(n.Proc(), "4711/cgroup"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("after the end of the process: %v", err)
			}
			if left, _ := n.Containers(); len(containers) != 1 || len(left) != 0 {
				t.Errorf("containers %v, and then %v", containers, left)
			}
		}},
		{"ecc", arguments{"gpu": "1", "kind": "corrected"}, func(t *testing.T, n *simnode.Node, events []nvml.Event) {
			for counter, want := range map[nvml.MemoryErrorCounter]uint64{
				{Location: nvml.DRAM}: 1, {Location: nvml.DRAM, Aggregate: true}: 1, {Location: nvml.SRAM}: 0,
				{Location: nvml.DRAM, Uncorrected: true}: 0,
			} {
				if count, err := n.DeviceGetMemoryErrorCounter(device(t, n, 1), counter); count != want || err != nil {
					t.Errorf("%+v: %d, %v, want %d", counter, count, err, want)
				}
			}
		}},
		{"power", arguments{"gpu": "1", "watts": "300"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if milliwatts, err := n.DeviceGetPowerUsage(device(t, n, 1)); milliwatts != 300_000 || err != nil {
				t.Errorf("%d mW, %v", milliwatts, err)
			}
		}},
		{"throttle", arguments{"gpu": "1", "reason": "sync_boost"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if reasons, err := n.DeviceGetCurrentClocksEventReasons(device(t, n, 1)); reasons != 0x10 || err != nil {
				t.Errorf("reasons %#x, %v", reasons, err)
			}
		}},
		{"throttle", arguments{"gpu": "1", "reason": "thermal"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if reasons, err := n.DeviceGetCurrentClocksEventReasons(device(t, n, 1)); reasons != nvml.HardwareThermalSlowdown || err != nil {
				t.Errorf("reasons %#x, %v", reasons, err)
			}
		}},
		{"process-add", arguments{"gpu": "3", "mig": "6", "pid": "1", "bytes": "1024"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			processes, err := n.DeviceGetComputeRunningProcesses(device(t, n, 3))
			if len(processes) != 1 || err != nil {
				t.Errorf("processes on the GPU: %v, %v", processes, err)
			}
			if memory, err := n.DeviceGetMemoryInfo(device(t, n, 3)); memory.Used != 1024 || err != nil {
				t.Errorf("%d bytes used on the GPU, %v", memory.Used, err)
			}
		}},
		{"client", arguments{"state": "closed"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			must(t, n.SetWorld("client=dcgm"))
			if _, err := fs.ReadFile(n.Proc(), "812/comm"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the client is seen: %v", err)
			}
			if activation, err := n.DeviceSetMigMode(device(t, n, 0), true); activation != nvml.Success || err != nil {
				t.Errorf("another mode without the client: %v, %v", activation, err)
			}
			must(t, n.Do("client", arguments{"state": "open"}))
			if activation, err := n.DeviceSetMigMode(device(t, n, 0), false); activation != nvml.InUse || err != nil {
				t.Errorf("another mode with the client: %v, %v", activation, err)
			}
			if err := n.Do("client", arguments{"state": "away"}); err == nil || !strings.Contains(err.Error(), "none of open, closed") {
				t.Errorf("another state: %v", err)
			}
		}},
		{"lose-nodes", nil, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if _, err := n.DeviceGetUUID(device(t, n, 0)); err != nil {
				t.Errorf("a GPU that was open: %v", err)
			}
			if err := n.OpenControl(); !errors.Is(err, syscall.EPERM) {
				t.Errorf("the control node: %v", err)
			}
			must(t, n.Init())
			must(t, n.Shutdown())
			must(t, n.Shutdown())
			if err := n.Init(); returned(err) != nvml.Unknown {
				t.Errorf("a new session: %v", err)
			}
		}},
		{"reboot", nil, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			for _, gpu := range n.GPUs() {
				if len(gpu.Partitions) > 0 || gpu.MIG != (gpu.Index == 2 || gpu.Index == 3) {
					t.Errorf("after the reboot: %+v", gpu)
				}
			}
		}},
		{"remove", arguments{"gpu": "0"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if count, _ := n.DeviceGetCount(); count != 5 {
				t.Errorf("%d GPUs, want 5", count)
			}
			must(t, n.Do("add", nil))
			if count, _ := n.DeviceGetCount(); count != 6 {
				t.Errorf("%d GPUs, want 6", count)
			}
		}},
		{"add", arguments{"model": "h200"}, func(t *testing.T, n *simnode.Node, _ []nvml.Event) {
			if name, err := n.DeviceGetName(device(t, n, 6)); name != "NVIDIA H200" || err != nil {
				t.Errorf("GPU 6 is %s, %v", name, err)
			}
		}},
	}
	done := map[string]bool{"heal": true, "process-remove": true, "process-work": true, "reload": true, "reset": true}
	for _, test := range tests {
		done[test.verb] = true
		t.Run(test.verb, func(t *testing.T) {
			node := open(t, "mixed")
			set := listen(t, node)
			must(t, node.Do(test.verb, test.arguments))
			var events []nvml.Event
			for {
				event, err := node.EventSetWait(set, 0)
				if err != nil {
					break
				}
				events = append(events, event)
			}
			test.check(t, node, events)
		})
	}
	for _, verb := range simnode.Verbs() {
		if !done[verb.Name] {
			t.Errorf("verb %s is not tested", verb.Name)
		}
	}
}

// listen registers all GPUs for all events.
func listen(t *testing.T, node *simnode.Node) nvml.EventSet {
	t.Helper()
	set, err := node.EventSetCreate()
	must(t, err)
	count, err := node.DeviceGetCount()
	must(t, err)
	for gpu := range count {
		device, err := node.DeviceGetHandleByIndex(gpu)
		must(t, err)
		types, err := node.DeviceGetSupportedEventTypes(device)
		must(t, err)
		must(t, node.DeviceRegisterEvents(device, types, set))
	}
	return set
}

func TestDoErrors(t *testing.T) {
	type arguments = map[string]string
	tests := []struct {
		name      string
		verb      string
		arguments arguments
		says      string
	}{
		{"no verb", "explode", nil, `no verb "explode": there are xid, ecc, `},
		{"no GPU named", "lose", nil, "lose: gpu is missing: index of the GPU"},
		{"GPU out of range", "lose", arguments{"gpu": "6"}, "lose: no GPU 6: the node has 0 to 5"},
		{"GPU that is no number", "heal", arguments{"gpu": "one"}, `gpu: "one" is no whole number`},
		{"negative GPU", "heal", arguments{"gpu": "-1"}, `gpu: "-1"`},
		{"unknown argument", "heal", arguments{"gpu": "1", "force": "yes"}, `heal: it takes no argument "force"`},
		{"no code", "xid", arguments{"gpu": "1"}, "code is missing: the XID"},
		{"two problems", "xid", arguments{"gpu": "x", "code": "y"}, `code: "y"`},
		{"instance out of range", "xid", arguments{"gpu": "1", "code": "79", "gi": "4294967295"}, "gi: 4294967295"},
		{"unknown call", "fail", arguments{"gpu": "1", "call": "GetName"}, `call: "GetName"`},
		{"unknown return code", "fail", arguments{"gpu": "1", "call": "DeviceGetName", "return": "LOST"}, `return: "LOST"`},
		{"unknown kind of error", "ecc", arguments{"gpu": "1", "kind": "double"}, `kind: "double" is none of corrected, uncorrected`},
		{"unknown recovery action", "advise", arguments{"gpu": "1", "action": "coffee"}, `action: "coffee" is none of none, reset, reboot, drain-p2p, drain-and-reset, imex, bus-reset, system-reboot, and no number`},
		{"unknown reason", "throttle", arguments{"gpu": "1", "reason": "heat"}, `reason: "heat" is none of thermal, power, none, gpu_idle, `},
		{"process on a GPU with MIG", "process-add", arguments{"gpu": "2", "pid": "1"}, "GPU 2 has MIG enabled"},
		{"process on no MIG device", "process-add", arguments{"gpu": "2", "mig": "4", "pid": "1"}, "no MIG device 2:4"},
		{"process that is not there", "process-remove", arguments{"gpu": "0", "pid": "1"}, "GPU 0: process 1 is not there"},
		{"unknown model", "add", arguments{"model": "t5"}, `no model "t5": there are a100-40`},
		{"nothing to add again", "add", nil, "no GPU was removed"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			err := open(t, "mixed").Do(test.verb, test.arguments)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %v does not say %q", err, test.says)
			}
		})
	}
	if err := open(t, "empty").Do("lose", arguments{"gpu": "0"}); err == nil || !strings.Contains(err.Error(), "the node has none") {
		t.Errorf("on an empty node: %v", err)
	}
}

func FuzzDo(f *testing.F) {
	for _, verb := range simnode.Verbs() {
		f.Add(verb.Name, "gpu", "1", "code", "79")
	}
	f.Fuzz(func(t *testing.T, verb, name, value, other, otherValue string) {
		node := open(t, "mixed")
		if node.Do(verb, map[string]string{name: value, other: otherValue}) != nil {
			return
		}
		// Whatever the verb was, the driver still lists its GPUs.
		if count, err := node.DeviceGetCount(); err != nil || count < 5 {
			t.Errorf("%d GPUs, %v", count, err)
		}
	})
}

func TestHandler(t *testing.T) {
	tests := []struct {
		name, method, target, body string
		want                       int
	}{
		{"query", "POST", "/sim/xid?gpu=0&code=79", "", http.StatusNoContent},
		{"form", "POST", "/sim/xid", "gpu=0&code=79", http.StatusNoContent},
		{"query and form", "POST", "/sim/xid?gpu=0", "code=79", http.StatusNoContent},
		{"wrong argument", "POST", "/sim/xid?gpu=0&code=x", "", http.StatusBadRequest},
		{"argument twice", "POST", "/sim/xid?gpu=0&gpu=1&code=79", "", http.StatusBadRequest},
		{"no form", "POST", "/sim/xid?gpu=%", "", http.StatusBadRequest},
		{"long body", "POST", "/sim/xid", "gpu=" + strings.Repeat("0", 1<<17) + "&code=79", http.StatusBadRequest},
		{"no verb", "POST", "/sim/explode", "", http.StatusNotFound},
		{"reading", "GET", "/sim/xid?gpu=0&code=79", "", http.StatusMethodNotAllowed},
		{"elsewhere", "POST", "/xid", "", http.StatusNotFound},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			request := httptest.NewRequest(test.method, test.target, strings.NewReader(test.body))
			request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			answer := httptest.NewRecorder()
			open(t, "t4").Handler().ServeHTTP(answer, request)
			if answer.Code != test.want {
				t.Errorf("status %d, want %d: %s", answer.Code, test.want, answer.Body)
			}
		})
	}
}

// TestFailWithoutGPU makes the next calls fail that are not about a GPU.
func TestFailWithoutGPU(t *testing.T) {
	node := open(t, "t4")
	must(t, node.Do("fail", map[string]string{"call": "Init", "return": "DRIVER_NOT_LOADED", "times": "1"}))
	if err := node.Init(); returned(err) != nvml.DriverNotLoaded {
		t.Errorf("Init() = %v, want DRIVER_NOT_LOADED", err)
	}
	must(t, node.Init())
	must(t, node.Shutdown())
	if err := node.Do("fail", map[string]string{"call": "Init"}); err == nil {
		t.Error("for ever")
	}
}
