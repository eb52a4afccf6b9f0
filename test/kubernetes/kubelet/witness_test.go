package kubelet

import (
	"context"
	"errors"
	"sync"

	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	deviceplugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
)

// witness stands between the plugin clients and the device manager and writes
// down what passes.
type witness struct {
	manager *devicemanager.ManagerImpl
	ledger  *ledger
	// slow, when set, stands between the device manager and every plugin.
	slow func(deviceplugin.DevicePlugin) deviceplugin.DevicePlugin
	// reading, when set, is called with each list before anyone has it.
	reading func()

	// mu is held while the manager works; dead means that its process ended,
	// and what still arrives reaches nobody.
	mu   sync.RWMutex
	dead bool
}

var errDead = errors.New("this kubelet has ended")

// PluginConnected passes on that a plugin has registered.
func (w *witness) PluginConnected(ctx context.Context, resource string, plugin deviceplugin.DevicePlugin) error {
	if w.slow != nil {
		plugin = w.slow(plugin)
	}
	// No lock: this call goes to the plugin and back.
	if err := w.manager.PluginConnected(ctx, resource, plugin); err != nil {
		return err
	}
	w.mu.RLock()
	defer w.mu.RUnlock()
	if w.dead {
		return errDead
	}
	w.ledger.connected(resource)
	return nil
}

// PluginDisconnected passes on that the kubelet has let go of a plugin.
func (w *witness) PluginDisconnected(logger klog.Logger, resource string) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if !w.dead {
		w.ledger.disconnected(resource)
		w.manager.PluginDisconnected(logger, resource)
	}
}

// PluginListAndWatchReceiver passes on a list.
func (w *witness) PluginListAndWatchReceiver(logger klog.Logger, resource string, list *api.ListAndWatchResponse) {
	if w.reading != nil {
		w.reading()
	}
	w.mu.RLock()
	defer w.mu.RUnlock()
	if !w.dead {
		at := w.ledger.received(resource, list)
		w.manager.PluginListAndWatchReceiver(logger, resource, list)
		w.ledger.applied(resource, at)
	}
}

// end returns when the manager hears nothing any more.
func (w *witness) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead = true
}
