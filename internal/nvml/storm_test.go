package nvml_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestResetInStorm lets every board report a fatal error, resets some, and lets
// anything happen to the node meanwhile. In the end a board is healthy if, and
// only if, it was reset.
func TestResetInStorm(t *testing.T) {
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4+all-balanced")
				s := &storm{T: t, sim: sim, w: watch(t, sim), random: rand.New(rand.NewPCG(seed, 0))}
				for range 5 {
					s.pass()
				}
			})
		})
	}
}

// storm is what happens to a node of four boards.
type storm struct {
	*testing.T
	sim    *simnode.Node
	w      *watched
	random *rand.Rand
	// reset are the boards that were, by UUID, and log what happened.
	reset map[string]bool
	log   []string
	// fails says that the driver will be closed, or is: a reset may now leave no
	// trace.
	fails bool
}

func (s *storm) chance(longest time.Duration) time.Duration {
	return time.Duration(s.random.Int64N(int64(longest)))
}

func (s *storm) pass() {
	s.reset, s.log, s.fails = map[string]bool{}, nil, false
	for gpu := range 4 {
		must(s.T, s.sim.XID(gpu, 79, nvml.WholeBoard, nvml.WholeBoard))
	}
	after(s.chance(rescan))
	for gpu, board := range s.sim.Boards() {
		if s.random.IntN(2) == 0 {
			must(s.T, s.sim.Heal(gpu))
			s.reset[board.UUID] = true
		}
	}
	began := time.Now()
	for range s.random.IntN(6) {
		s.log = append(s.log, fmt.Sprint(time.Since(began), " ", s.trouble()))
		after(s.chance(12 * time.Second))
	}
	for _, err := s.sim.Add(""); err == nil; {
		_, err = s.sim.Add("")
	}
	s.log = append(s.log, fmt.Sprint(time.Since(began), " all boards are there"))
	after(3 * time.Minute)
	s.judge()
	for gpu := range 4 {
		must(s.T, s.sim.Heal(gpu))
	}
	after(2 * time.Minute)
	s.w.expect("between two storms", nil)
}

// trouble happens to the node, and is returned in words.
func (s *storm) trouble() string {
	boards := slices.DeleteFunc(s.sim.Boards(), func(b simnode.Board) bool { return b.Index < 0 })
	gpu := s.random.IntN(len(boards))
	calls := []string{
		"DeviceGetUUID", "DeviceGetName", "DeviceGetMemoryInfo", "DeviceGetTemperature",
		"DeviceGetHandleByIndex", "DeviceGetMigMode", "DeviceGetGpuInstanceId",
	}
	call := calls[s.random.IntN(len(calls))]
	var err error
	switch s.random.IntN(6) {
	case 0:
		s.fails = true
		times := 1 + s.random.IntN(3)
		s.sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: times})
		return fmt.Sprint("the next lists fail: ", times)
	case 1:
		if s.fails || len(boards) == 1 {
			return "nothing"
		}
		s.reset[boards[gpu].UUID] = true
		must(s.T, s.sim.Remove(gpu))
		return fmt.Sprint("pulled: ", gpu)
	case 2:
		_, err = s.sim.Add("")
		return fmt.Sprint("put back, unless: ", err)
	case 3:
		fault := simnode.Fault{Delay: s.chance(20 * time.Second), Times: 1 + s.random.IntN(2)}
		_, err = s.sim.ScriptGPU(gpu, call, fault)
		must(s.T, err)
		return fmt.Sprint("slow: ", gpu, call, fault)
	case 4:
		_, err = s.sim.ScriptGPU(gpu, call, simnode.Fault{Return: nvml.Unknown, Times: 1})
		must(s.T, err)
		return fmt.Sprint("fails once: ", gpu, call)
	}
	must(s.T, s.sim.XID(gpu, 94, 99, 0)) // Of a partition that there is not.
	return "another look"
}

func (s *storm) judge() {
	gpus, err := s.w.Inventory()
	must(s.T, err)
	for _, gpu := range gpus {
		healed := gpu.Fault == "" || strings.HasPrefix(gpu.Fault, "recovering from cannot be read")
		if healed != s.reset[gpu.UUID] || !healed && gpu.Fault != "XID 79" {
			s.Errorf("GPU %d: fault %q, reset: %v, after\n%s", gpu.Index, gpu.Fault, s.reset[gpu.UUID], strings.Join(s.log, "\n"))
		}
	}
}
