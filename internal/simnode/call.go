package simnode

import (
	"errors"
	"reflect"
	"slices"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// Fault is how an NVML call misbehaves.
type Fault struct {
	// Return is the error of the call; with nvml.Success the call does its work.
	Return nvml.Return
	// Delay is how long the call takes. It holds up no other call, unless it changes MIG mode or
	// instances: the kernel module makes such changes one at a time for all GPUs, and every other
	// call waits meanwhile. (The module's tables list the controls for such changes, for example
	// subdeviceCtrlCmdGpuSetPartitions and gisubscriptionCtrlCmdExecPartitionsCreate, without a
	// shared API lock and without the lock of a single GPU.)
	Delay time.Duration
	// Until is a channel that the call waits for after Delay, without holding up others; nil
	// disables it.
	Until <-chan struct{}
	// Skip is the number of calls that are answered normally first.
	Skip int
	// Times is how many calls misbehave after that; 0 for all.
	Times int
}

// injectedFault is a Fault in force.
type injectedFault struct {
	call string
	// gpu limits the fault to calls for one GPU; nil for all calls.
	gpu   *simGPU
	fault Fault
	// seen counts the calls that the fault could have hit.
	seen int
}

// InjectFault makes calls of the named function, such as "DeviceGetUUID", misbehave. If several
// faults apply to a call, the first that is not used up takes effect. end removes the fault; it may
// be called more than once.
func (n *Node) InjectFault(call string, fault Fault) (end func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.addFault(&injectedFault{call: call, fault: fault})
}

// InjectGPUFault is InjectFault for the calls about one GPU or its partitions, even when the GPU's
// index changes later. Heal ends it.
func (n *Node) InjectGPUFault(gpu int, call string, fault Fault) (end func(), err error) {
	err = n.change(gpu, func(g *simGPU) {
		end = n.addFault(&injectedFault{
			call:  call,
			gpu:   g,
			fault: fault,
		})
	})
	return end, err
}

func (n *Node) addFault(f *injectedFault) (end func()) {
	n.faults = append(n.faults, f)
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.faults = slices.DeleteFunc(n.faults, func(other *injectedFault) bool { return other == f })
	}
}

// Calls returns how often the named function was called.
func (n *Node) Calls(call string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.calls[call]
}

// faultFor returns the fault for a call about the GPU, or the zero Fault if there is none. gpu is
// nil for a call that is not about a GPU.
func (n *Node) faultFor(call string, gpu *simGPU) Fault {
	for _, f := range n.faults {
		if f.call != call || f.gpu != nil && f.gpu != gpu {
			continue
		}
		f.seen++
		turn := f.seen - f.fault.Skip
		if turn >= 1 && (f.fault.Times == 0 || turn <= f.fault.Times) {
			return f.fault
		}
	}
	return Fault{}
}

// call is the interceptor of every NVML call. It counts the call, injects the fault that is in
// force for it, and lets the driver answer under the Node's lock. The lock is not held during a
// fault's delay. The call waits while a slow change of MIG instances is under way.
func (n *Node) call(call nvml.Call, do func() (any, error)) (any, error) {
	n.mu.Lock()
	n.calls[call.Method]++
	t := n.targetOf(call)
	fault := n.faultFor(call.Method, t.gpu)
	opened := n.opened > 0 || call.Method == "Init"
	refused := n.refuses(call, t)
	n.mu.Unlock()
	if call.Method != "EventSetWait" {
		n.driver <- struct{}{}
		if fault.Delay == 0 || !slices.Contains(migChanges, call.Method) {
			<-n.driver
		} else {
			defer func() { <-n.driver }()
		}
	}
	if fault.Delay > 0 {
		<-time.After(fault.Delay)
	}
	if fault.Until != nil {
		<-fault.Until
	}
	var answer any
	var err error
	switch {
	case fault.Return != nvml.Success:
		err = fault.Return
		if call.Method == "DeviceRegisterEvents" && fault.Return == nvml.Unknown {
			n.breakSet(call.Arguments[2].(nvml.EventSet))
		}
	case !opened:
		err = nvml.Uninitialized
	case refused:
		err = nvml.NoPermission
	case call.Method == "EventSetWait":
		answer, err = do() // It takes the lock itself.
	default:
		n.mu.Lock()
		defer n.mu.Unlock()
		err = n.check(call)
		if err == nil {
			answer, err = do()
		}
	}
	if mismatch, failed := errors.AsType[*nvml.VersionMismatch](err); failed {
		return nil, mismatch
	}
	if code, failed := errors.AsType[nvml.Return](err); failed {
		return nil, &nvml.Error{Call: call.String(), Return: code}
	}
	return answer, nil
}

// targetOf returns the GPU, instance or MIG device of a call; the zero target if the call is not
// about one.
func (n *Node) targetOf(call nvml.Call) (t target) {
	if len(call.Arguments) > 0 {
		if index, lookup := call.Arguments[0].(int); lookup {
			t.gpu, _ = n.gpu(index)
			return t
		}
		t, _ = n.target(call.Arguments[0])
	}
	return t
}

// target returns the object that an argument of a call refers to; handle is false if the argument
// is not a handle.
func (n *Node) target(argument any) (t target, handle bool) {
	switch argument.(type) {
	case nvml.Device, nvml.GPUInstance, nvml.ComputeInstance:
		return n.targets[reflect.ValueOf(argument).Uint()], true
	}
	return t, false
}

// migChanges are the calls that change MIG mode or instances.
var migChanges = []string{
	"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceDestroy",
	"GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy",
}

// check returns the error of a call with wrong handles; nil if they are right.
func (n *Node) check(call nvml.Call) error {
	for _, argument := range call.Arguments {
		t, handle := n.target(argument)
		migDevice := t.compute != nil && t.instance == nil
		switch {
		case !handle:
			continue
		case t.gpu == nil:
			return nvml.InvalidArgument
		case t.void || t.gpu.lost || t.gpu.removed:
			return nvml.GPUIsLost
		}
		switch call.Method {
		case "DeviceGetUUID", "DeviceGetName", "DeviceGetMemoryInfo", "DeviceGetArchitecture",
			"DeviceGetCudaComputeCapability",
			"DeviceGetComputeRunningProcesses", "DeviceGetGraphicsRunningProcesses",
			"DeviceGetMPSComputeRunningProcesses", "DeviceGetMemoryErrorCounter":
			// For GPUs and MIG devices.
		case "DeviceGetGpuInstanceId", "DeviceGetComputeInstanceId":
			if !migDevice {
				return nvml.InvalidArgument
			}
		case "DeviceGetAttributes":
			if !migDevice {
				return nvml.NotSupported
			}
		case "DeviceGetUtilizationRates", "DeviceGetProcessUtilization":
			if migDevice || t.gpu.mig {
				return nvml.NotSupported
			}
		default: // For GPUs and instances.
			if migDevice {
				return nvml.NotSupported
			}
		}
	}
	return nil
}

// driver makes the NVML calls. The Node's lock is held, and check has accepted the handles. Its
// errors are NVML's return codes.
type driver struct{ node *Node }

func (n driver) gpu(d nvml.Device) *simGPU { return n.node.targets[uint64(d)].gpu }

// migDevice returns nil for a GPU.
func (n driver) migDevice(d nvml.Device) *computeInstance { return n.node.targets[uint64(d)].compute }

func (n driver) instance(gi nvml.GPUInstance) *gpuInstance {
	return n.node.targets[uint64(gi)].instance
}

// target is the object of a handle: a GPU, a GPU instance, a compute instance, or a MIG device,
// which has no instance here.
type target struct {
	gpu      *simGPU
	instance *gpuInstance
	compute  *computeInstance
	// void is true once the GPU has been reset: every call then returns GPU_IS_LOST.
	void bool
}

func (n *Node) handle(t target) uint64 {
	n.handlesMade++
	n.targets[n.handlesMade] = t
	return n.handlesMade
}

// renewHandles gives the GPU and its MIG devices new handles. The old ones become void.
func (n *Node) renewHandles(g *simGPU) {
	for handle, t := range n.targets {
		t.void = t.void || t.gpu == g && t.instance == nil
		n.targets[handle] = t
	}
	g.handle = nvml.Device(n.handle(target{gpu: g}))
	for _, c := range g.computes() {
		c.handle = nvml.Device(n.handle(target{gpu: g, compute: c}))
	}
}
