package simnode

import (
	"fmt"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// target is what a device handle stands for: a board, or a MIG device of it.
type target struct {
	board   *board
	compute *computeInstance
}

// answers is the return code with which the device answers every call.
func (t target) answers(d nvml.Device) nvml.Return {
	switch {
	case t.board == nil:
		return nvml.InvalidArgument
	case t.board.lost || t.board.pulled:
		return nvml.GPUIsLost
	case t.compute == nil && t.board.handle != d, t.compute != nil && t.compute.handle != d:
		return nvml.GPUIsLost
	}
	return nvml.Success
}

// renewHandles gives the board and its MIG devices new handles; the old ones
// stay known, and dead.
func (n *Node) renewHandles(b *board) {
	b.handle = nvml.Device(n.handle())
	n.devices[b.handle] = target{board: b}
	for _, i := range b.instances {
		for _, c := range i.computes {
			c.handle = nvml.Device(n.handle())
			n.devices[c.handle] = target{board: b, compute: c}
		}
	}
}

// enter is the beginning of every call: it counts the call and plays the script
// for it. It must be called without the lock, which a delay must not hold.
func (n *Node) enter(call string, b *board) error {
	n.mu.Lock()
	n.calls[call]++
	fault := n.scripted(call, b)
	opened := n.opened > 0
	n.mu.Unlock()
	if fault.Delay > 0 {
		<-time.After(fault.Delay)
	}
	if fault.Return != nvml.Success {
		return failed(call, fault.Return)
	}
	if !opened && call != "Init" {
		return failed(call, nvml.Uninitialized)
	}
	return nil
}

// ask makes a call for a device: with the lock held, answer says what comes of
// it on a device that answers at all.
func ask[T any](n *Node, call string, d nvml.Device, answer func(target) (T, nvml.Return)) (T, error) {
	var nothing T
	n.mu.Lock()
	t := n.devices[d]
	n.mu.Unlock()
	if err := n.enter(call, t.board); err != nil {
		return nothing, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	code := t.answers(d)
	if code == nvml.Success {
		var value T
		if value, code = answer(t); code == nvml.Success {
			return value, nil
		}
	}
	return nothing, failed(call, code)
}

// askBoard is ask for a call that makes no sense for a MIG device.
func askBoard[T any](n *Node, call string, d nvml.Device, answer func(*board) (T, nvml.Return)) (T, error) {
	return ask(n, call, d, func(t target) (T, nvml.Return) {
		if t.compute != nil {
			var nothing T
			return nothing, nvml.NotSupported
		}
		return answer(t.board)
	})
}

// askMIG is ask for a call that makes sense only for a MIG device.
func askMIG[T any](n *Node, call string, d nvml.Device, answer func(*computeInstance) (T, nvml.Return)) (T, error) {
	return ask(n, call, d, func(t target) (T, nvml.Return) {
		if t.compute == nil {
			var nothing T
			return nothing, nvml.InvalidArgument
		}
		return answer(t.compute)
	})
}

// askInstance is ask for a GPU instance.
func askInstance[T any](n *Node, call string, handle nvml.GPUInstance, answer func(*board, *gpuInstance) (T, nvml.Return)) (T, error) {
	return askPart(n, call, handle, n.findInstance, answer)
}

// askCompute is ask for a compute instance.
func askCompute[T any](n *Node, call string, handle nvml.ComputeInstance, answer func(*computeInstance) (T, nvml.Return)) (T, error) {
	return askPart(n, call, handle, n.findCompute, func(_ *board, c *computeInstance) (T, nvml.Return) { return answer(c) })
}

// askPart is ask for an instance, which find finds, or nil, with its board.
func askPart[Handle, Part, T any](
	n *Node, call string, handle Handle, find func(Handle) (*board, *Part), answer func(*board, *Part) (T, nvml.Return),
) (T, error) {
	var nothing T
	n.mu.Lock()
	b, _ := find(handle)
	n.mu.Unlock()
	if err := n.enter(call, b); err != nil {
		return nothing, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	b, part := find(handle)
	code := nvml.InvalidArgument
	var value T
	switch {
	case part == nil:
	case b.lost:
		code = nvml.GPUIsLost
	default:
		value, code = answer(b, part)
	}
	if code != nvml.Success {
		return nothing, failed(call, code)
	}
	return value, nil
}

func failed(call string, code nvml.Return) error { return &nvml.Error{Call: call, Return: code} }

// with writes the argument of a call into its name.
func with(call string, argument int) string { return fmt.Sprintf("%s(%d)", call, argument) }
