package simnode

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

// Verb is a named change of a Node. Do makes it, a request to Handler makes it, and a command line
// can be built from this description.
type Verb struct {
	// Name is in lower case, with dashes.
	Name string
	// Usage is one line, without a full stop.
	Usage     string
	Arguments []Argument
	do        func(*Node, values) error
}

// Argument is a named value that a Verb takes. All values are text.
type Argument struct {
	// Name is the key for Do and, unless Positional, the flag.
	Name string
	// Usage is one line, without a full stop.
	Usage string
	// Positional is true if a command line has the value without its name.
	Positional bool
	// Optional is true if the argument may be left out; its value is then absent.
	Optional bool
	absent   any
	// parse parses the value; its error need not name the argument.
	parse func(text string) (any, error)
}

// values are a verb's arguments by name, as parsed.
type values map[string]any

func (v values) number(name string) int { return v[name].(int) }

var (
	gpuArgument = Argument{
		Name:  "gpu",
		Usage: "index of the GPU, as the driver counts now",
		parse: parseNumber,
	}
	giArgument = Argument{
		Name:     "gi",
		Usage:    "ID of the GPU instance; without it the whole GPU",
		Optional: true,
		absent:   nvml.WholeGPU,
		parse:    parseInstance,
	}
	ciArgument = Argument{
		Name:     "ci",
		Usage:    "ID of the compute instance; without it all of the GPU instance",
		Optional: true,
		absent:   nvml.WholeGPU,
		parse:    parseInstance,
	}
	migArgument = Argument{
		Name:     "mig",
		Usage:    "index of the MIG device on the GPU; without it the GPU itself",
		Optional: true,
		absent:   WholeGPU,
		parse:    parseNumber,
	}
	processArgument = Argument{
		Name:       "pid",
		Usage:      "process ID on the host",
		Positional: true,
		parse:      parseNumber,
	}
	callArgument = Argument{
		Name:       "call",
		Usage:      "NVML call without its prefix, for example DeviceGetMemoryInfo",
		Positional: true,
		parse:      parseCall,
	}
)

// Verbs returns all verbs, in the order for a help text.
func Verbs() []Verb {
	return []Verb{
		{"xid", "make a GPU, or one of its partitions, report an XID error", []Argument{
			gpuArgument, {
				Name:       "code",
				Usage:      "the XID",
				Positional: true,
				parse:      parseNumber,
			}, giArgument, ciArgument,
		}, func(n *Node, v values) error {
			return n.XID(v.number("gpu"), uint64(v.number("code")), v["gi"].(uint32), v["ci"].(uint32))
		}},
		{"ecc", "make a GPU report a memory error", []Argument{gpuArgument, {
			Name:     "kind",
			Usage:    "corrected (a single-bit error) or uncorrected (a double-bit one); uncorrected when left out",
			Optional: true,
			absent:   true,
			parse:    parseError,
		}}, func(n *Node, v values) error { return n.ECC(v.number("gpu"), v["kind"].(bool)) }},
		{"repair", "make a GPU need a reset to repair its memory", []Argument{gpuArgument}, onGPU((*Node).Repair)},
		{"advise", "have the driver ask for a recovery action of a GPU", []Argument{gpuArgument, {
			Name: "action",
			Usage: "none, reset, reboot, drain-p2p, drain-and-reset, imex, bus-reset, system-reboot, or another " +
				"number of NVML's",
			Positional: true,
			parse:      parseRecovery,
		}}, func(n *Node, v values) error { return n.Advise(v.number("gpu"), uint32(v.number("action"))) }},
		{"fabric", "set how far a GPU is in joining its fabric of NVLinks", []Argument{gpuArgument,
			{
				Name:       "state",
				Usage:      "NVML's number: 0 not supported, 1 not started, 2 in progress, 3 completed",
				Positional: true,
				parse:      parseNumber,
			},
			{
				Name:     "status",
				Usage:    "with which code that ended; 0 when left out",
				Optional: true,
				absent:   0,
				parse:    parseNumber,
			},
			{
				Name: "summary",
				Usage: "NVML's number of the health summary: 1 healthy, 2 unhealthy, 3 limited capacity; 0 when " +
					"left out",
				Optional: true,
				absent:   0,
				parse:    parseNumber,
			},
		}, func(n *Node, v values) error {
			return n.SetFabric(v.number("gpu"), nvml.FabricInfo{
				State:         v.number("state"),
				Status:        nvml.Return(v.number("status")),
				HealthSummary: v.number("summary"),
			})
		}},
		{"ready", "set the ready state of confidential computing", []Argument{
			{
				Name:       "state",
				Usage:      "0 not ready, 1 ready",
				Positional: true,
				parse:      parseNumber,
			},
		}, func(n *Node, v values) error {
			n.SetReady(uint32(v.number("state")))
			return nil
		}},
		{
			"unavailable", "make a GPU report that it is unavailable", []Argument{gpuArgument},
			onGPU((*Node).Unavailable),
		},
		{"lose", "make a GPU fall off the bus", []Argument{gpuArgument}, onGPU((*Node).Lose)},
		{
			"heal", "reset a GPU, which repairs everything and takes its partitions away", []Argument{gpuArgument},
			onGPU((*Node).Heal),
		},
		{"reset", "reset a GPU with nvidia-smi --gpu-reset, which is refused while a program has it open",
			[]Argument{gpuArgument}, onGPU(func(n *Node, gpu int) (err error) {
				missing := n.change(gpu, func(g *simGPU) { err = n.resetUnused(g) })
				return errors.Join(missing, err)
			})},
		{"reload", "unload the driver and load it again, which is refused while a program has it open", nil,
			func(n *Node, _ values) error {
				return n.Reload()
			}},
		{"client", "have the program of --sim-world client=NAME open the GPUs or close them", []Argument{
			{
				Name:       "state",
				Usage:      "open or closed",
				Positional: true,
				parse:      parseClient,
			},
		}, func(n *Node, v values) error {
			n.SetClient(v["state"].(bool))
			return nil
		}},
		{"lose-nodes",
			"take the driver's device nodes from this container, as systemctl daemon-reload may: what is open " +
				"stays open", nil, func(n *Node, _ values) error {
				n.LoseNodes()
				return nil
			}},
		{"reboot", "reset all GPUs as a reboot of the machine does, which takes all partitions away", nil,
			func(n *Node, _ values) error {
				n.Reboot()
				return nil
			}},
		{"temperature", "set a GPU's temperature", []Argument{
			gpuArgument, {
				Name:       "celsius",
				Usage:      "degrees Celsius",
				Positional: true,
				parse:      parseNumber,
			},
		}, func(n *Node, v values) error { return n.SetTemperature(v.number("gpu"), v.number("celsius")) }},
		{"power", "set the power that a GPU draws", []Argument{
			gpuArgument, {
				Name:       "watts",
				Usage:      "watts",
				Positional: true,
				parse:      parseNumber,
			},
		}, func(n *Node, v values) error { return n.SetPower(v.number("gpu"), v.number("watts")) }},
		{"fail", "make a driver call fail, for a GPU until it is healed, or without a GPU a number of times",
			[]Argument{
				{
					Name: "gpu",
					Usage: "index of the GPU; without it the next calls of that name fail, also those for no GPU, " +
						"such as Init",
					Optional: true,
					absent:   noGPU,
					parse:    parseNumber,
				}, callArgument,
				{
					Name:     "return",
					Usage:    "NVML return code; UNKNOWN when left out",
					Optional: true,
					absent:   nvml.Unknown,
					parse:    parseReturn,
				},
				{
					Name:     "times",
					Usage:    "how many calls fail; all when left out, which takes a GPU",
					Optional: true,
					absent:   0,
					parse:    parseNumber,
				},
			}, injectFault(func(v values) Fault {
				return Fault{Return: v["return"].(nvml.Return), Times: v.number("times")}
			})},
		{"slow", "make a driver call slow for a GPU until it is healed", []Argument{
			gpuArgument, callArgument, {
				Name:       "milliseconds",
				Usage:      "how long it takes",
				Positional: true,
				parse:      parseNumber,
			},
		}, injectFault(func(v values) Fault {
			return Fault{Delay: time.Duration(v.number("milliseconds")) * time.Millisecond}
		})},
		{"process-add", "start a process on a GPU or a MIG device", []Argument{
			gpuArgument, migArgument, processArgument,
			{
				Name:     "bytes",
				Usage:    "memory that it uses; 0 when left out",
				Optional: true,
				absent:   0,
				parse:    parseNumber,
			},
			{
				Name:     "sm",
				Usage:    "percent of a whole GPU that it keeps busy; 0 when left out",
				Optional: true,
				absent:   0,
				parse:    parseNumber,
			},
			{
				Name:     "container",
				Usage:    "where it runs, as NAMESPACE/POD/CONTAINER; on the host itself when left out",
				Optional: true,
				absent:   sharing.Container{},
				parse:    parseContainer,
			},
		}, func(n *Node, v values) error {
			gpu := v.number("gpu")
			pid := v.number("pid")
			percent := v.number("sm")
			if err := n.AddProcess(gpu, v.number("mig"), pid, uint64(v.number("bytes"))); err != nil {
				return err
			}
			n.SetContainer(pid, v["container"].(sharing.Container))
			if percent == 0 {
				return nil
			}
			return n.SetUtilization(gpu, pid, percent)
		}},
		{"process-work", "make a process keep a whole GPU busy", []Argument{
			gpuArgument, processArgument, {
				Name:  "sm",
				Usage: "percent of the GPU",
				parse: parseNumber,
			},
		}, func(n *Node, v values) error {
			return n.SetUtilization(v.number("gpu"), v.number("pid"), v.number("sm"))
		}},
		{"throttle", "make a GPU reduce its clocks", []Argument{
			gpuArgument, {
				Name:       "reason",
				Usage:      "thermal, power, none, or a name of NVML's such as hw_slowdown",
				Positional: true,
				parse:      parseReason,
			},
		}, func(n *Node, v values) error { return n.Throttle(v.number("gpu"), v["reason"].(nvml.ClockReasons)) }},
		{"process-remove", "end a process on a GPU or a MIG device", []Argument{
			gpuArgument, migArgument, processArgument,
		}, func(n *Node, v values) error {
			return n.RemoveProcess(v.number("gpu"), v.number("mig"), v.number("pid"))
		}},
		{"remove", "take a GPU out of the node", []Argument{gpuArgument}, onGPU((*Node).Remove)},
		{"add", "put a GPU into the node", []Argument{
			{
				Name:       "model",
				Usage:      "kind of GPU, ? lists them; when left out, the one that was removed last",
				Positional: true,
				Optional:   true,
				absent:     "",
				parse:      func(text string) (any, error) { return text, nil },
			},
		}, func(n *Node, v values) error {
			_, err := n.Add(v["model"].(string))
			return err
		}},
	}
}

const noGPU = -1

// injectFault returns the function of a verb that injects a fault. The fault stays until the GPU is
// healed, or for a number of calls.
func injectFault(fault func(values) Fault) func(*Node, values) error {
	return func(n *Node, v values) error {
		f := fault(v)
		switch {
		case v.number("gpu") != noGPU:
			_, err := n.InjectGPUFault(v.number("gpu"), v["call"].(string), f)
			return err
		case f.Times == 0:
			return errors.New("times is missing: without a GPU nothing else ends it")
		}
		n.InjectFault(v["call"].(string), f)
		return nil
	}
}

// onGPU returns the function of a verb that has the GPU as its only argument.
func onGPU(do func(n *Node, gpu int) error) func(*Node, values) error {
	return func(n *Node, v values) error { return do(n, v.number("gpu")) }
}

// Do runs the named verb; arguments maps names to values. The error says which arguments are
// missing, unknown or wrong, or why the node cannot do it.
func (n *Node) Do(verb string, arguments map[string]string) error {
	verbs := Verbs()
	i := slices.IndexFunc(verbs, func(v Verb) bool { return v.Name == verb })
	if i < 0 {
		var names []string
		for _, v := range verbs {
			names = append(names, v.Name)
		}
		return fmt.Errorf("%w %q: there are %s", errNoVerb, verb, strings.Join(names, ", "))
	}
	read, err := verbs[i].read(arguments)
	if err == nil {
		err = verbs[i].do(n, read)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return nil
}

var errNoVerb = errors.New("no verb")

// read parses the arguments. It is an error if one is missing or unknown.
func (v Verb) read(arguments map[string]string) (values, error) {
	for _, a := range v.Arguments {
		if arguments[a.Name] == "" && !a.Optional {
			return nil, fmt.Errorf("%s is missing: %s", a.Name, a.Usage)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(arguments)) {
		if !slices.ContainsFunc(v.Arguments, func(a Argument) bool { return a.Name == name }) {
			return nil, fmt.Errorf("it takes no argument %q", name)
		}
	}
	parsed := values{}
	var problems []error
	for _, a := range v.Arguments {
		parsed[a.Name] = a.absent
		if text := arguments[a.Name]; text != "" {
			value, err := a.parse(text)
			if err != nil {
				problems = append(problems, fmt.Errorf("%s: %w", a.Name, err))
			}
			parsed[a.Name] = value
		}
	}
	return parsed, errors.Join(problems...)
}

func parseNumber(text string) (any, error) {
	number, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return nil, fmt.Errorf("%q is no whole number from 0 on", text)
	}
	return int(number), nil
}

// recoveryActions are the names of nvml.RecoverNone and the actions after it.
var recoveryActions = []string{
	"none", "reset", "reboot", "drain-p2p", "drain-and-reset", "imex", "bus-reset", "system-reboot",
}

func parseRecovery(text string) (any, error) {
	if action := slices.Index(recoveryActions, text); action >= 0 {
		return action, nil
	}
	if action, err := strconv.ParseUint(text, 10, 32); err == nil {
		return int(action), nil
	}
	return nil, fmt.Errorf("%q is none of %s, and no number", text, strings.Join(recoveryActions, ", "))
}

func parseInstance(text string) (any, error) {
	id, err := parseNumber(text)
	switch {
	case err != nil:
		return nil, err
	case uint64(id.(int)) >= uint64(nvml.WholeGPU):
		return nil, fmt.Errorf("%d is no instance ID", id)
	}
	return uint32(id.(int)), nil
}

func parseContainer(text string) (any, error) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 || slices.Contains(parts, "") {
		return nil, fmt.Errorf("%q is not NAMESPACE/POD/CONTAINER", text)
	}
	return sharing.Container{
		Namespace: parts[0],
		Pod:       parts[1],
		Name:      parts[2],
	}, nil
}

func parseReason(text string) (any, error) {
	reason, known := map[string]nvml.ClockReasons{
		"thermal": nvml.HardwareThermalSlowdown,
		"power":   nvml.SoftwarePowerCap,
		"none":    0,
	}[text]
	if bit := slices.Index(sharing.ClockReasons(), text); bit >= 0 {
		reason, known = 1<<bit, true
	}
	if !known {
		return nil, fmt.Errorf("%q is none of thermal, power, none, %s", text,
			strings.Join(sharing.ClockReasons(), ", "))
	}
	return reason, nil
}

// parseClient reports whether the program has the GPUs open.
func parseClient(text string) (any, error) {
	if text != "open" && text != "closed" {
		return nil, fmt.Errorf("%q is none of open, closed", text)
	}
	return text == "open", nil
}

// parseError reports whether the error was uncorrected.
func parseError(text string) (any, error) {
	if text != "corrected" && text != "uncorrected" {
		return nil, fmt.Errorf("%q is none of corrected, uncorrected", text)
	}
	return text == "uncorrected", nil
}

func parseCall(text string) (any, error) {
	if _, ok := reflect.TypeFor[nvml.Library]().MethodByName(text); !ok {
		return nil, fmt.Errorf("%q is no call, such as DeviceGetMemoryInfo", text)
	}
	return text, nil
}

func parseReturn(text string) (any, error) {
	code, ok := nvml.ParseReturn(text)
	if !ok {
		return nil, fmt.Errorf("%q is no NVML return code, such as GPU_IS_LOST", text)
	}
	return code, nil
}

// maxBodyBytes limits the body of a request.
const maxBodyBytes = 1 << 16

// Handler serves the verbs on the control socket: POST /sim/xid?gpu=0&code=79, with the arguments
// in the query or as a form in the body. It answers 204, or 400 with the error as text, or 404 if
// there is no such verb.
func (n *Node) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /sim/{verb}", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, maxBodyBytes)
		if err := r.ParseForm(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		arguments := map[string]string{}
		for name, given := range r.Form {
			if len(given) > 1 {
				http.Error(w, name+" is given more than once", http.StatusBadRequest)
				return
			}
			arguments[name] = given[0]
		}
		err := n.Do(r.PathValue("verb"), arguments)
		switch {
		case errors.Is(err, errNoVerb):
			http.Error(w, err.Error(), http.StatusNotFound)
		case err != nil:
			http.Error(w, err.Error(), http.StatusBadRequest)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	})
	return mux
}
