package simkubelet

import "time"

// Quantity is a resource's count in a node's status.
type Quantity struct{ Capacity, Allocatable int }

// reportStatus publishes the node's status until the process stops.
func (k *Kubelet) reportStatus(p *process) {
	ticker := time.NewTicker(k.options.StatusPeriod)
	defer ticker.Stop()
	for {
		k.lock()
		k.publish(p)
		k.unlock()
		select {
		case <-ticker.C:
		case <-p.stopping:
			return
		}
	}
}

// ReportStatus publishes the node's status now. It does nothing while the
// kubelet is down.
func (k *Kubelet) ReportStatus() {
	k.lock()
	defer k.unlock()
	if k.process != nil {
		k.publish(k.process)
	}
}

// publish copies the counts into the node's status. A resource whose endpoint
// has been stopped for longer than the grace is removed on this occasion and no
// other; its name stays in the status with zeros. The caller holds the lock.
func (k *Kubelet) publish(p *process) {
	removed := false
	for resource, devices := range p.devices {
		endpoint := p.endpoints[resource]
		expired := endpoint == nil ||
			!endpoint.stopped.IsZero() && k.options.Now().Sub(endpoint.stopped) > k.options.StopGrace
		if !expired {
			k.node[resource] = Quantity{devices.capacity(), len(devices.healthy)}
			continue
		}
		delete(p.endpoints, resource)
		delete(p.devices, resource)
		k.node[resource] = Quantity{}
		removed = true
	}
	if removed {
		k.writeCheckpoint(p)
	}
}
