package soak

import (
	"fmt"
	"slices"
	"time"
)

// blow adds one operation of a storm.
func (s *scheduler) blow() {
	if s.cutOff > 0 {
		if s.cutOff--; s.cutOff == 0 {
			s.cutOff = 1
			s.mend()
		}
	}
	switch n := s.random.IntN(100); {
	case n < 45:
		s.pod()
	case n < 65:
		s.profile()
	case n < 80:
		s.hardware()
	case n < 85:
		s.add(operation{kind: pick(s.random, hangup, scrape)})
	case s.rough:
		s.disturb()
	default:
		s.pod()
	}
}

// mostPods is how many pods there are at once, failed ones too.
const mostPods = 16

func (s *scheduler) pod() {
	if len(s.pods) > 0 && (len(s.pods) >= mostPods || s.one(3)) {
		at := s.random.IntN(len(s.pods))
		s.add(operation{kind: remove, name: s.pods[at]})
		s.pods = slices.Delete(s.pods, at, at+1)
		return
	}
	if len(s.pods) > 0 && s.one(4) {
		s.add(operation{kind: pick(s.random, restartContainer, resizePod), name: pick(s.random, s.pods...)})
		return
	}
	s.made++
	names := s.inForce.names()
	if s.one(6) {
		names = []string{gpuName, gpuName + ".shared", h100Name, "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-3g.40gb"}
	}
	o := operation{kind: admit, name: fmt.Sprintf("pod-%d", s.made), resource: pick(s.random, names...), count: 1}
	if s.one(4) {
		o.count = 2 + s.random.IntN(2)
	}
	if s.one(8) {
		o.text = "init"
	}
	s.pods = append(s.pods, o.name)
	s.add(o)
}

// calls that a storm lets fail or take long; those of the second kind cut.
var (
	readingCalls = []string{"DeviceGetMemoryInfo", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetUUID", "DeviceGetMigMode", "DeviceGetTemperature", "EventSetWait", "DeviceGetMigDeviceHandleByIndex"}
	cuttingCalls = []string{"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy", "GpuInstanceDestroy"}
)

func (s *scheduler) hardware() {
	ordinal := s.random.IntN(boards)
	if slices.Contains(s.pulled, ordinal) {
		s.plug()
		return
	}
	condition := &s.conditions[ordinal]
	switch n := s.random.IntN(20); {
	case n < 3:
		s.add(operation{kind: lose, board: ordinal})
		*condition = faulty
	case n < 8:
		s.heal(ordinal)
	case n < 10 && *condition != faulty:
		s.add(operation{kind: pick(s.random, xid, partitionXID), board: ordinal, count: pick(s.random, 79, 48, 94, 62, 13, 109)})
		*condition = doubtful
	case n < 11:
		s.add(operation{kind: heat, board: ordinal})
		*condition = faulty
	case n < 13:
		if len(s.pulled) < boards-2 {
			s.add(operation{kind: pull, board: ordinal})
			s.pulled = append(s.pulled, ordinal)
			*condition = faulty
		}
	case n < 14:
		s.plug()
	case n < 17:
		s.add(operation{kind: failCall, name: pick(s.random, readingCalls...), count: 1 + s.random.IntN(4)})
	case n < 18:
		s.add(operation{kind: failCall, name: pick(s.random, cuttingCalls...), count: 1})
	default:
		s.add(operation{
			kind: slowCall, name: pick(s.random, slices.Concat(readingCalls, cuttingCalls)...),
			count: 1 + s.random.IntN(5), delay: time.Duration(20+s.random.IntN(200)) * time.Millisecond,
		})
	}
}

// plug puts the board back that was pulled last.
func (s *scheduler) plug() {
	if last := len(s.pulled) - 1; last >= 0 {
		s.add(operation{kind: plug, board: s.pulled[last]})
		s.conditions[s.pulled[last]] = sound
		s.pulled = s.pulled[:last]
	}
}

// mostCuts bounds how long the program stays away from an API server that comes
// and goes: it doubles its pause each time.
const mostCuts = 2

func (s *scheduler) disturb() {
	switch n := s.random.IntN(20); {
	case n < 3:
		s.add(operation{kind: s.orKill(restartProgram, killProgram)})
	case n < 4:
		s.add(operation{kind: succeed})
	case n < 7:
		s.add(operation{kind: restartKubelet})
		s.unheard = true
	case n < 9:
		if s.unheard {
			s.add(operation{kind: restorePods})
			s.unheard = false
		}
	case n < 10 && s.one(3):
		s.add(operation{kind: reboot})
		s.unheard = true
	case n < 10:
		s.add(operation{kind: wipe})
		s.unheard = true
	case n < 12:
		s.add(operation{kind: dropStream, resource: pick(s.random, s.inForce.names()...)})
	case n < 14:
		s.add(operation{kind: deleteSockets})
	case n < 15:
		s.add(operation{kind: slowStream, delay: time.Duration(5+s.random.IntN(60)) * time.Millisecond})
		s.slow = true
	case n < 16:
		s.add(operation{kind: refuse, count: 1 + s.random.IntN(3)})
	case n < 17 && s.one(4):
		s.add(operation{kind: silence, count: 1})
		s.silenced = true
	case s.cutOff == 0 && s.cuts < mostCuts && n < 18:
		s.add(operation{kind: expire})
		s.cuts++
	case s.cutOff == 0 && s.cuts < mostCuts:
		s.add(operation{kind: cut})
		s.cutOff, s.cuts = 2+s.random.IntN(6), s.cuts+1
	}
}
