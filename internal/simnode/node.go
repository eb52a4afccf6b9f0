package simnode

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

// Node is a simulated node, and the nvml.Library of its driver. All methods may be called from any
// goroutine.
//
// Methods that name a GPU take its current index in the driver's enumeration. If it is out of
// range, the error names the range.
type Node struct {
	// Library has the calls of the node's driver.
	nvml.Library
	name   string
	worlds []string
	// unlisted is how many GPUs the driver does not list; they are the last ones.
	unlisted int

	mu sync.Mutex
	// gpus has the GPUs in the order of the driver's enumeration, removed those that are no longer
	// in the node.
	gpus, removed []*simGPU
	// gpusMade, handlesMade and bindingsMade count all that were ever made.
	gpusMade                  int
	handlesMade, bindingsMade uint64
	targets                   map[uint64]target
	sets                      map[nvml.EventSet]*eventSet
	// opened is the number of Init calls minus the number of Shutdown calls.
	opened int
	faults []*injectedFault
	calls  map[string]int
	// driver has room for the one call that excludes all others; see Fault.Delay.
	driver chan struct{}
	// containers are the containers of processes, by PID.
	containers map[int]sharing.Container
	// mps has the roles of MPS servers and clients, by PID. serversMade is the number of servers
	// ever started.
	mps         map[int]mpsRole
	serversMade int
	// ready is the ready state of confidential computing.
	ready uint32
	// clientAway is true while the program of the world "client" has closed the GPUs.
	clientAway bool
	// nodesLost is true once this process can no longer open the driver's device nodes.
	nodesLost bool
	// eventsChanged is closed and replaced whenever an EventSetWait may return.
	eventsChanged chan struct{}
}

func newNode(name string) *Node {
	n := &Node{
		name:          name,
		targets:       map[uint64]target{},
		sets:          map[nvml.EventSet]*eventSet{},
		calls:         map[string]int{},
		containers:    map[int]sharing.Container{},
		mps:           map[int]mpsRole{},
		eventsChanged: make(chan struct{}),
		driver:        make(chan struct{}, 1),
	}
	n.Library = nvml.Intercept(driver{n}, n.call)
	return n
}

// Name returns the node's name, without +LAYOUT.
func (n *Node) Name() string { return n.name }

func (n *Node) gpu(index int) (*simGPU, error) {
	switch {
	case len(n.gpus) == 0:
		return nil, fmt.Errorf("no GPU %d: the node has none", index)
	case index < 0 || index >= len(n.gpus):
		return nil, fmt.Errorf("no GPU %d: the node has 0 to %d", index, len(n.gpus)-1)
	}
	return n.gpus[index], nil
}

// insert puts the GPU into the enumeration, which is ordered by ordinal.
func (n *Node) insert(g *simGPU) {
	n.gpus = append(n.gpus, g)
	slices.SortFunc(n.gpus, func(a, b *simGPU) int { return cmp.Compare(a.ordinal, b.ordinal) })
}

// GPU is the true state of a GPU, even if its driver returns something else.
type GPU struct {
	UUID string
	// Index is the index in the driver's enumeration, -1 for a removed GPU.
	Index int
	// MIG is the mode in force.
	MIG  bool
	Lost bool // it has fallen off the bus
	// ComputeMode and TimeSlice are the values set since the last reset.
	ComputeMode nvml.ComputeMode
	TimeSlice   sharing.TimeSlice
	// Partitions are in the order of their MIG device indexes; nil for none.
	Partitions []Partition
}

// Partition is a MIG device of a GPU.
type Partition struct {
	UUID string
	// Profile is the profile as nvidia-smi writes it: "1g.5gb".
	Profile string
	// GPUInstance and ComputeInstance are its IDs on the GPU.
	GPUInstance, ComputeInstance int
}

// GPUs returns all GPUs, including removed ones, in the order of their creation. The result shares
// no memory with the node.
func (n *Node) GPUs() []GPU {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := slices.Concat(n.gpus, n.removed)
	slices.SortFunc(all, func(a, b *simGPU) int { return cmp.Compare(a.ordinal, b.ordinal) })
	gpus := make([]GPU, len(all))
	for i, g := range all {
		gpus[i] = GPU{
			UUID:        g.uuid,
			Index:       slices.Index(n.gpus, g),
			MIG:         g.mig,
			Lost:        g.lost,
			ComputeMode: g.computeMode,
			TimeSlice:   g.timeSlice,
			Partitions:  g.partitions(),
		}
	}
	return gpus
}

func (g *simGPU) partitions() []Partition {
	computes := g.computes()
	slices.SortFunc(computes, func(a, b *computeInstance) int { return cmp.Compare(a.index, b.index) })
	var partitions []Partition
	for _, c := range computes {
		partitions = append(partitions, Partition{
			UUID:            c.uuid,
			Profile:         c.profile().String(),
			GPUInstance:     c.instance.id,
			ComputeInstance: c.id,
		})
	}
	return partitions
}
