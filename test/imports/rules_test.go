package imports

// rule says what the packages of one folder may import besides the standard
// library.
type rule struct {
	// folder is relative to the module. The rule holds for it and for the
	// folders below it that have no rule of their own.
	folder string
	// ours are packages of this module, exactly as named.
	ours []string
	// foreign are import path prefixes outside this module.
	foreign []string
	// pure forbids what impure lists.
	pure bool
	// anything lets bans be the only limit.
	anything bool
}

const (
	module = "github.com/virgate/virgate"

	clientGolang = "github.com/prometheus/client_golang"
	exporterKit  = "github.com/prometheus/exporter-toolkit"
	goCmp        = "github.com/google/go-cmp"
	goNVML       = "github.com/NVIDIA/go-nvml"
	grpc         = "google.golang.org/grpc"
	kubeletAPI   = "k8s.io/kubelet"
	protobuf     = "google.golang.org/protobuf"
	syncGroup    = "golang.org/x/sync"
	timeRate     = "golang.org/x/time"
	yamlJSON     = "sigs.k8s.io/yaml"
	yamlNodes    = "go.yaml.in/yaml/v3"
)

// rules are the arrows of docs/architecture.md. A package that none of them
// covers is a violation: a new package states its arrows here first.
func rules() []rule {
	return []rule{
		{folder: "mig", pure: true},
		{folder: "sharing", ours: []string{"mig"}, pure: true},
		{folder: "configs", ours: []string{"sharing", "mig"}, foreign: []string{yamlJSON, yamlNodes}, pure: true},
		{folder: "sharing/metrics", ours: []string{"sharing"}, foreign: []string{clientGolang}},
		{folder: "plugin", ours: []string{"sharing"}, foreign: []string{grpc, protobuf, kubeletAPI, syncGroup, timeRate}},

		{
			folder:  "internal/agent",
			ours:    []string{"mig", "sharing", "sharing/metrics", "configs", "plugin"},
			foreign: []string{clientGolang, exporterKit, syncGroup, timeRate},
		},
		{folder: "internal/nvml/driver", ours: []string{"mig", "internal/nvml"}, foreign: []string{goNVML}},
		{folder: "internal/nvml/trace", ours: []string{"mig", "internal/nvml"}},
		{folder: "internal/nvml/nvmltest", ours: []string{"sharing", "internal/nvml"}, foreign: []string{goCmp}},
		{folder: "internal/nvml", ours: []string{"mig", "sharing"}},
		{folder: "internal/simnode", ours: []string{"mig", "sharing", "internal/nvml"}, foreign: []string{yamlJSON, yamlNodes}},
		{folder: "internal/simkubelet", ours: []string{"sharing"}, foreign: []string{grpc, protobuf, kubeletAPI, syncGroup, timeRate}},
		{
			folder:  "internal/policy",
			ours:    []string{"sharing", "configs"},
			foreign: []string{"k8s.io/client-go", "k8s.io/api", "k8s.io/apimachinery", syncGroup},
		},
		{
			folder:  "internal/policy/report",
			ours:    []string{"sharing"},
			foreign: []string{"k8s.io/client-go", "k8s.io/api", "k8s.io/apimachinery", timeRate},
		},
		{folder: "internal/podresources", ours: []string{"sharing", "plugin"}, foreign: []string{grpc, protobuf, kubeletAPI, timeRate}},
		{folder: "internal/usage", ours: []string{"sharing"}},
		{folder: "internal/state", ours: []string{"mig", "sharing", "configs", "plugin"}},
		{
			folder:  "internal/cdi",
			ours:    []string{"sharing", "plugin"},
			foreign: []string{"github.com/NVIDIA/nvidia-container-toolkit", "tags.cncf.io"},
		},
		{folder: "internal/host", ours: []string{"sharing", "plugin"}},

		{folder: "cmd", anything: true},
		{folder: "test", anything: true},
	}
}

// ban keeps one import path, and what lies below it, inside one folder.
type ban struct {
	path, only, why string
}

// bans hold everywhere, in folders that may import anything too.
func bans() []ban {
	return []ban{
		{path: "C", only: "internal/nvml/driver", why: "everything else builds without a C compiler"},
		{path: goNVML, only: "internal/nvml/driver", why: "it needs cgo"},
		{path: "github.com/NVIDIA/nvidia-container-toolkit", only: "internal/cdi", why: "it needs cgo"},
		{path: "tags.cncf.io", only: "internal/cdi", why: "CDI specs are made in one place"},
		{path: "k8s.io/client-go", only: "internal/policy", why: "no other package talks to the API server"},
		{path: exporterKit, only: "internal/agent", why: "HTTP is served in one place"},
		{path: "os/exec", only: "test", why: "Virgate runs no commands"},
	}
}

// impure are the packages, with those below them, that do I/O, depend on the
// process or are random. The clock is missing because time.Duration is a pure
// value; the linter forbids time.Now and its like by name.
func impure() []string {
	return []string{
		"C", "crypto/rand", "io/ioutil", "log", "math/rand", "net", "os", "plugin", "runtime", "syscall", "unsafe",
	}
}
