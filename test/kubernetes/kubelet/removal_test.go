package kubelet

import (
	"slices"
	"testing"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// telling is that the kubelet was told of a device that it is Unhealthy, and has
// not been told anything else since.
type telling struct {
	// at is when, and place which one of the account's beliefs that was.
	at    time.Time
	place int
}

// removal is that a device, last told so, left the list.
type removal struct {
	id   string
	told telling
	at   time.Time
}

// followTellings takes down who is told Unhealthy in the newest list, and who is
// in it no more.
func (a *account) followTellings(now time.Time) {
	for id, healthy := range a.last {
		if _, already := a.told[id]; healthy {
			delete(a.told, id)
		} else if !already {
			a.told[id] = telling{now, len(a.beliefs) - 1}
		}
	}
	for id, told := range a.told {
		if _, stays := a.last[id]; !stays {
			a.removals = append(a.removals, removal{id, told, now})
			delete(a.told, id)
		}
	}
}

// removed returns the resource's removals, in order.
func (l *ledger) removed(resource string) []removal {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.account(resource).removals)
}

// overtook says that an admission of the resource was slower than the quiet time
// is long. It began with the belief at this place in force and had ended by the
// time given. The kubelet was told during it that the device is Unhealthy, so
// may have chosen it before that; and by its end the device had been Unhealthy
// for the quiet time and was then removed. A device that was removed earlier
// than that did not overtake anybody.
func (l *ledger) overtook(resource, id string, at int, ended time.Time, quiet time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.account(resource).removals {
		// The list without it comes to the kubelet after the plugin has let go of
		// it, maybe long after; the admission's end does not.
		left := r.at
		if ended.Before(left) {
			left = ended
		}
		if r.id == id && r.told.place > at && left.Sub(r.told.at) >= quiet {
			return true
		}
	}
	return false
}

// The excuse for a refused device hides no removal that came too early.
func TestOvertook(t *testing.T) {
	const quiet = 50 * time.Millisecond
	const device, other = "GPU-1::1", "GPU-1::0"
	type list struct {
		after time.Duration // since the one before
		// devices are Healthy where true; nil ends the plugin.
		devices belief
	}
	healthy, unhealthy, gone := belief{other: true, device: true}, belief{other: true, device: false}, belief{other: true}
	for _, test := range []struct {
		name string
		// before came before the admission began, during is what came after that.
		before, during []list
		// ended is when the admission had ended, since the last list.
		ended time.Duration
		want  bool
	}{
		{name: "slow admission", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {quiet, gone}}, want: true},
		{name: "list without it arrives late", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {quiet + 9, gone}}, ended: -9, want: true},
		{name: "removed too early", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {quiet - 1, gone}}, ended: time.Hour},
		{name: "refused too early, list late", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {2 * quiet, gone}}, ended: -quiet - 1},
		{name: "removed while Healthy", before: []list{{0, healthy}}, during: []list{{time.Hour, gone}}, ended: time.Hour},
		{name: "not removed", before: []list{{0, healthy}}, during: []list{{1, unhealthy}, {time.Hour, unhealthy}}, ended: time.Hour},
		{name: "Healthy again in between", before: []list{{0, healthy}},
			during: []list{{1, unhealthy}, {quiet, healthy}, {1, unhealthy}, {quiet - 1, gone}}, ended: time.Hour},
		{name: "told before the admission", before: []list{{0, healthy}, {1, unhealthy}}, during: []list{{quiet, gone}}},
		{name: "removed before the admission", before: []list{{0, healthy}, {1, unhealthy}, {quiet, gone}}, ended: time.Hour},
		{name: "plugin lost in between, told since", before: []list{{0, healthy}},
			during: []list{{1, nil}, {time.Hour, unhealthy}, {quiet - 1, gone}}, ended: time.Hour},
		{name: "unhealthy again in a longer list", before: []list{{0, healthy}},
			during: []list{{1, unhealthy}, {quiet / 2, unhealthy}, {quiet / 2, gone}}, want: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			now := time.Now()
			l := newLedger(func(string, string) bool { return false })
			l.clock = func() time.Time { return now }
			take := func(lists []list) {
				for _, next := range lists {
					now = now.Add(next.after)
					if next.devices == nil {
						l.disconnected(gpu)
						continue
					}
					l.applied(gpu, l.received(gpu, response(next.devices)))
				}
			}
			take(test.before)
			at := l.now(gpu)
			take(test.during)
			ended := now.Add(test.ended)
			if got := l.overtook(gpu, device, at, ended, quiet); got != test.want {
				t.Errorf("%t, want %t", got, test.want)
			}
			if l.overtook(gpu, other, at, ended, quiet) || l.overtook(shared, device, at, ended, quiet) {
				t.Error("another device, or one of another resource, is excused")
			}
		})
	}
}

// The excuse is for one message only, about the resource.
func TestUnknownDevice(t *testing.T) {
	for _, test := range []struct {
		message, want string
		is            bool
	}{
		{`Allocate failed due to rpc error: code = NotFound desc = nvidia.com/gpu has no device "GPU-1::1", which is unexpected`, "GPU-1::1", true},
		{`Allocate failed due to rpc error: code = NotFound desc = nvidia.com/h100 has no device "GPU-1::1", which is unexpected`, "", false},
		{`nvidia.com/gpu has no device "GPU-1::1`, "", false},
		{`nvidia.com/gpu: device GPU-1::1 must not be used: XID 79`, "", false},
		{`requested number of devices unavailable for nvidia.com/gpu`, "", false},
	} {
		if got, is := unknownDevice(test.message, gpu); is != test.is || is && got != test.want {
			t.Errorf("%s: %q, %t", test.message, got, is)
		}
	}
}

func response(devices belief) *api.ListAndWatchResponse {
	list := &api.ListAndWatchResponse{}
	for id, healthy := range devices {
		health := api.Unhealthy
		if healthy {
			health = api.Healthy
		}
		list.Devices = append(list.Devices, &api.Device{ID: id, Health: health})
	}
	return list
}
