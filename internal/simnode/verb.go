package simnode

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Verb is something that can be done to a Node by name: through Do, a request
// to Handler, or a command line that is built from this description.
type Verb struct {
	// Name is lower case with dashes.
	Name string
	// Usage is one line, without a full stop.
	Usage     string
	Arguments []Argument
	do        func(*Node, *values)
}

// Argument is a named value that a Verb takes. Values are text; Do reads them.
type Argument struct {
	// Name is the key for Do and, unless Positional, the flag.
	Name string
	// Usage is one line, without a full stop.
	Usage string
	// Positional says that a command line gives the value without its name.
	Positional bool
	// Optional says that it may be left out.
	Optional bool
}

var (
	gpuArgument     = Argument{Name: "gpu", Usage: "index of the GPU"}
	giArgument      = Argument{Name: "gi", Usage: "ID of the GPU instance that is hit; without it the whole board is", Optional: true}
	ciArgument      = Argument{Name: "ci", Usage: "ID of the compute instance in it; without it all of them", Optional: true}
	migArgument     = Argument{Name: "mig", Usage: "index of the MIG device on the GPU; without it the GPU itself", Optional: true}
	processArgument = Argument{Name: "pid", Usage: "process ID on the host", Positional: true}
)

// Verbs are all verbs, in the order in which to show them.
func Verbs() []Verb {
	return []Verb{
		{"xid", "let a GPU, or one of its partitions, report an XID error", []Argument{
			gpuArgument, {Name: "code", Usage: "the XID", Positional: true}, giArgument, ciArgument,
		}, func(n *Node, v *values) {
			gpu, code := v.number("gpu"), v.number("code")
			gi, ci := v.instance("gi"), v.instance("ci")
			v.run(func() error { return n.XID(gpu, uint64(code), gi, ci) })
		}},
		{"ecc", "let a GPU report a double-bit memory error", []Argument{gpuArgument}, func(n *Node, v *values) {
			gpu := v.number("gpu")
			v.run(func() error { return n.ECC(gpu, true) })
		}},
		{"repair", "let a GPU need a reset to repair its memory", []Argument{gpuArgument}, toGPU((*Node).Repair)},
		{"lose", "let a GPU fall off the bus", []Argument{gpuArgument}, toGPU((*Node).Lose)},
		{"heal", "reset a GPU, which mends everything", []Argument{gpuArgument}, toGPU((*Node).Heal)},
		{"temperature", "set a GPU's temperature", []Argument{
			gpuArgument, {Name: "celsius", Usage: "degrees Celsius", Positional: true},
		}, func(n *Node, v *values) {
			gpu, celsius := v.number("gpu"), v.number("celsius")
			v.run(func() error { return n.Temperature(gpu, celsius) })
		}},
		{"fail", "let a driver call fail for a GPU until it is healed", []Argument{
			gpuArgument,
			{Name: "call", Usage: "NVML call without its prefix, for example DeviceGetMemoryInfo", Positional: true},
			{Name: "return", Usage: "NVML return code; UNKNOWN when left out", Optional: true},
			{Name: "times", Usage: "how many calls fail; all when left out", Optional: true},
		}, func(n *Node, v *values) {
			gpu, call := v.number("gpu"), v.call("call")
			fault := Fault{Return: v.code("return"), Times: v.count("times")}
			v.run(func() error {
				_, err := n.ScriptGPU(gpu, call, fault)
				return err
			})
		}},
		{"slow", "let a driver call take long for a GPU until it is healed", []Argument{
			gpuArgument,
			{Name: "call", Usage: "NVML call without its prefix, for example DeviceGetMemoryInfo", Positional: true},
			{Name: "milliseconds", Usage: "how long it takes", Positional: true},
		}, func(n *Node, v *values) {
			gpu, call := v.number("gpu"), v.call("call")
			fault := Fault{Delay: time.Duration(v.number("milliseconds")) * time.Millisecond}
			v.run(func() error {
				_, err := n.ScriptGPU(gpu, call, fault)
				return err
			})
		}},
		{"process-add", "let a process use a GPU or a MIG device", []Argument{
			gpuArgument, migArgument, processArgument,
			{Name: "bytes", Usage: "memory that it uses; 0 when left out", Optional: true},
			{Name: "sm", Usage: "percent of a whole GPU that it keeps busy; 0 when left out", Optional: true},
			{Name: "container", Usage: "where it runs, as NAMESPACE/POD/CONTAINER; on the host itself when left out", Optional: true},
		}, func(n *Node, v *values) {
			gpu, device, pid, bytes := v.number("gpu"), v.device("mig"), v.number("pid"), v.count("bytes")
			percent, container := v.count("sm"), v.container("container")
			v.run(func() error {
				if err := n.AddProcess(gpu, device, pid, uint64(bytes)); err != nil {
					return err
				}
				n.Contain(pid, container)
				if percent == 0 {
					return nil
				}
				return n.Work(gpu, pid, percent)
			})
		}},
		{"process-work", "let a process on a whole GPU keep it busy", []Argument{
			gpuArgument, processArgument, {Name: "sm", Usage: "percent of the GPU"},
		}, func(n *Node, v *values) {
			gpu, pid, percent := v.number("gpu"), v.number("pid"), v.number("sm")
			v.run(func() error { return n.Work(gpu, pid, percent) })
		}},
		{"throttle", "let a GPU lower its clocks", []Argument{
			gpuArgument, {Name: "reason", Usage: "thermal, power, hw_slowdown or none", Positional: true},
		}, func(n *Node, v *values) {
			gpu, reason := v.number("gpu"), v.reason("reason")
			v.run(func() error { return n.Throttle(gpu, reason) })
		}},
		{"process-remove", "end a process's use of a GPU or a MIG device", []Argument{
			gpuArgument, migArgument, processArgument,
		}, func(n *Node, v *values) {
			gpu, device, pid := v.number("gpu"), v.device("mig"), v.number("pid")
			v.run(func() error { return n.RemoveProcess(gpu, device, pid) })
		}},
		{"remove", "pull a GPU out of the node", []Argument{gpuArgument}, toGPU((*Node).Remove)},
		{"add", "plug a GPU into the node", []Argument{
			{Name: "model", Usage: "kind of board: " + modelKeys() + "; when left out, the one that was removed last", Positional: true, Optional: true},
		}, func(n *Node, v *values) {
			model := v.text("model")
			v.run(func() error {
				_, err := n.Add(model)
				return err
			})
		}},
	}
}

// toGPU is a verb that takes nothing but the GPU.
func toGPU(do func(n *Node, gpu int) error) func(*Node, *values) {
	return func(n *Node, v *values) {
		gpu := v.number("gpu")
		v.run(func() error { return do(n, gpu) })
	}
}

// Do does what the verb of that name says, with the arguments by name. An error
// says which of them are missing, unknown or wrong, or why the node refused.
func (n *Node) Do(verb string, arguments map[string]string) error {
	verbs := Verbs()
	i := slices.IndexFunc(verbs, func(v Verb) bool { return v.Name == verb })
	if i < 0 {
		names := make([]string, len(verbs))
		for i, v := range verbs {
			names[i] = v.Name
		}
		return fmt.Errorf("%w %q: there are %s", errNoVerb, verb, strings.Join(names, ", "))
	}
	v, err := verbs[i].read(arguments)
	if err == nil {
		verbs[i].do(n, v)
		err = v.err()
	}
	if err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return nil
}

// read checks that the arguments are the verb's.
func (v Verb) read(arguments map[string]string) (*values, error) {
	known := map[string]bool{}
	for _, a := range v.Arguments {
		known[a.Name] = true
		if arguments[a.Name] == "" && !a.Optional {
			return nil, fmt.Errorf("%s is missing: %s", a.Name, a.Usage)
		}
	}
	for _, name := range sortedKeys(arguments) {
		if !known[name] {
			return nil, fmt.Errorf("it takes no argument %q", name)
		}
	}
	return &values{arguments: arguments}, nil
}
