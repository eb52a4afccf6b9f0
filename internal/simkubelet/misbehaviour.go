package simkubelet

import "time"

// misbehaviour is what tests make the kubelet do wrong.
type misbehaviour struct {
	silent   bool
	refusals int
	delay    time.Duration
}

// SetSilent makes the kubelet take Register calls and never answer them.
func (k *Kubelet) SetSilent(silent bool) {
	k.lock()
	defer k.unlock()
	k.misbehaviour.silent = silent
}

// RefuseRegister makes the next n Register calls fail at once.
func (k *Kubelet) RefuseRegister(n int) {
	k.lock()
	defer k.unlock()
	k.misbehaviour.refusals = n
}

// SlowStream makes the kubelet wait before it reads each list, from the next
// list of each stream but one on, and before it notices the end of a stream: one
// goroutine does both, and writes the checkpoint in between. 0 ends that.
func (k *Kubelet) SlowStream(delay time.Duration) {
	k.lock()
	defer k.unlock()
	k.misbehaviour.delay = delay
}

// DropStream disconnects the plugin that serves a resource, as a kubelet does
// that cannot read a list, and says whether there was one. The plugin sees its
// stream's context cancelled.
func (k *Kubelet) DropStream(resource string) bool {
	k.lock()
	defer k.unlock()
	if k.process == nil || k.process.clients[resource] == nil {
		return false
	}
	dropped := k.process.clients[resource]
	dropped.dropped = true
	k.disconnect(k.process, dropped)
	return true
}

// CutConnections ends the connections to all plugins, as when their processes are
// killed: calls under way fail, and the ends of streams are noticed like others.
func (k *Kubelet) CutConnections() {
	k.lock()
	defer k.unlock()
	if k.process == nil {
		return
	}
	for c := range k.process.connections {
		c.close()
	}
}

// dawdle waits as SlowStream asks and is false when the process stops first.
func (k *Kubelet) dawdle(p *process) bool {
	k.mu.Lock()
	delay := k.misbehaviour.delay
	k.mu.Unlock()
	if delay == 0 {
		return true
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.stopping:
		return false
	}
}
