package kubelet

import (
	"reflect"
	"sync"
	"time"
	"unsafe"

	cadvisor "github.com/google/cadvisor/info/v1"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	deviceplugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// newManagerImpl makes a device manager in any directory; the exported one
// knows only the kubelet's own.
//
//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(klog.Logger, string, []cadvisor.Node, topologymanager.Store) (*devicemanager.ManagerImpl, error)

// inside returns a private field of the struct that v is or points to.
func inside[T any](v reflect.Value, name string) *T {
	for v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
		v = v.Elem()
	}
	return (*T)(unsafe.Pointer(v.FieldByName(name).UnsafeAddr()))
}

func locked(manager *devicemanager.ManagerImpl) *sync.Mutex {
	return inside[sync.Mutex](reflect.ValueOf(manager), "mutex")
}

// attach makes a plugin server that reports to witness the manager's own.
func attach(manager *devicemanager.ManagerImpl, socket string, witness deviceplugin.ClientHandler) error {
	server, err := deviceplugin.NewServer(klog.Background(), socket, manager, witness)
	if err != nil {
		return err
	}
	*inside[deviceplugin.Server](reflect.ValueOf(manager), "server") = server
	return nil
}

// setBack moves the time at which the resource's plugin stopped into the past;
// false when the manager does not know the resource or its plugin has not
// stopped.
func setBack(manager *devicemanager.ManagerImpl, resource string, by time.Duration) bool {
	mutex := locked(manager)
	mutex.Lock()
	defer mutex.Unlock()
	endpoint := reflect.ValueOf(manager).Elem().FieldByName("endpoints").MapIndex(reflect.ValueOf(resource))
	if !endpoint.IsValid() {
		return false
	}
	mutex = inside[sync.Mutex](endpoint.FieldByName("e"), "mutex")
	mutex.Lock()
	defer mutex.Unlock()
	stopped := inside[time.Time](endpoint.FieldByName("e"), "stopTime")
	if stopped.IsZero() {
		return false
	}
	*stopped = stopped.Add(-by)
	return true
}
