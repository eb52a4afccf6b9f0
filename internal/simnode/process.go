package simnode

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing/fstest"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

// WholeGPU as a MIG device index means the GPU itself.
const WholeGPU = -1

// AddProcess starts a process on the GPU, or on the MIG device at the index. The process uses that
// many bytes of memory. A partition with a process cannot be destroyed.
func (n *Node) AddProcess(gpu, device, pid int, bytes uint64) error {
	return n.changeProcesses(gpu, device, func(list []nvml.Process) ([]nvml.Process, error) {
		if indexOf(list, pid) >= 0 {
			return nil, fmt.Errorf("process %d is there already", pid)
		}
		if mode := n.gpus[gpu].computeMode; mode == nvml.ComputeProhibited ||
			mode == nvml.ComputeExclusiveProcess && len(list) > 0 {
			return nil, fmt.Errorf("all CUDA-capable devices are busy or unavailable: compute mode %d, processes %d",
				mode, len(list))
		}
		return append(list, nvml.Process{PID: pid, Memory: bytes}), nil
	})
}

// RemoveProcess ends the process on the GPU or MIG device.
func (n *Node) RemoveProcess(gpu, device, pid int) error {
	return n.changeProcesses(gpu, device, func(list []nvml.Process) ([]nvml.Process, error) {
		at := indexOf(list, pid)
		if at < 0 {
			return nil, fmt.Errorf("process %d is not there", pid)
		}
		return slices.Delete(list, at, at+1), nil
	})
}

func (n *Node) changeProcesses(gpu, device int, change func([]nvml.Process) ([]nvml.Process, error)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	g, err := n.gpu(gpu)
	if err != nil {
		return err
	}
	list, where := &g.processes, fmt.Sprintf("GPU %d", gpu)
	if device != WholeGPU {
		where = fmt.Sprintf("MIG device %d:%d", gpu, device)
		c := g.computeAt(device)
		if c == nil {
			return fmt.Errorf("no %s", where)
		}
		list = &c.processes
	} else if g.mig {
		return fmt.Errorf("%s has MIG enabled: a process needs one of its MIG devices", where)
	}
	maps.DeleteFunc(n.mps, func(pid int, _ mpsRole) bool { return !n.hasProcess(pid) })
	changed, err := change(*list)
	if err != nil {
		return fmt.Errorf("%s: %w", where, err)
	}
	*list = changed
	// Forget the utilization and the containers of processes that have ended.
	here, running := sets.New[int](), sets.New[int]()
	for _, p := range g.processes {
		here.Insert(p.PID)
	}
	for _, g := range n.gpus {
		for _, p := range g.allProcesses() {
			running.Insert(p.PID)
		}
	}
	maps.DeleteFunc(g.utilization.percent, func(pid, _ int) bool { return !here.Has(pid) })
	maps.DeleteFunc(n.containers, func(pid int, _ sharing.Container) bool { return !running.Has(pid) })
	return nil
}

func indexOf(list []nvml.Process, pid int) int {
	return slices.IndexFunc(list, func(p nvml.Process) bool { return p.PID == pid })
}

func (g *simGPU) allProcesses() []nvml.Process {
	all := slices.Clone(g.processes)
	for _, c := range g.computes() {
		all = append(all, c.processes...)
	}
	return all
}

// A real driver samples the utilization of processes at intervals of a sixth of a second to a
// second (nvml.h, nvmlDeviceGetProcessUtilization), and keeps some samples.
const (
	samplePeriod = time.Second / 6
	samplesKept  = 256
)

// utilization is how busy processes keep a GPU. The Node's lock guards it.
type utilization struct {
	// percent maps PIDs to utilizations.
	percent map[int]int
	samples []nvml.ProcessSample
	// sampled is the time of the last sample, in microseconds.
	sampled uint64
}

// SetUtilization makes a process on the GPU keep that percentage of its multiprocessors busy. It
// has no effect on MIG devices, because drivers report no utilization by process for them.
func (n *Node) SetUtilization(gpu, pid, percent int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	g, err := n.gpu(gpu)
	if err != nil {
		return err
	}
	if indexOf(g.processes, pid) < 0 {
		return fmt.Errorf("GPU %d: process %d is not there", gpu, pid)
	}
	if percent < 0 || percent > 100 {
		return fmt.Errorf("GPU %d: %d is not in 0 to 100 percent", gpu, percent)
	}
	if g.utilization.percent == nil {
		g.utilization.percent = map[int]int{}
	}
	g.utilization.percent[pid] = percent
	return nil
}

// TakeSample makes the driver sample the GPU's processes now.
func (n *Node) TakeSample(gpu int) error {
	return n.change(gpu, func(g *simGPU) { g.utilization.take(max(now(), g.utilization.sampled+1)) })
}

func now() uint64 { return uint64(time.Now().UnixMicro()) }

// take takes a sample. It leaves out idle processes.
func (u *utilization) take(at uint64) {
	u.sampled = at
	for _, pid := range slices.Sorted(maps.Keys(u.percent)) {
		if percent := u.percent[pid]; percent > 0 {
			u.samples = append(u.samples, nvml.ProcessSample{
				PID:  pid,
				Time: at,
				SM:   percent,
			})
		}
	}
	u.samples = u.samples[max(0, len(u.samples)-samplesKept):]
}

// since returns the samples after the given time. It takes a new one first if that is due.
func (u *utilization) since(lastSeen uint64) []nvml.ProcessSample {
	if at := now(); at >= u.sampled+uint64(samplePeriod.Microseconds()) {
		u.take(at)
	}
	var newer []nvml.ProcessSample
	for _, s := range u.samples {
		if s.Time > lastSeen {
			newer = append(newer, s)
		}
	}
	return newer
}

// total returns how busy the GPU is, in percent.
func (u *utilization) total() int {
	sum := 0
	for _, percent := range u.percent {
		sum += percent
	}
	return min(sum, 100)
}

// SetContainer sets the container of the process; the zero Container stands for the host itself.
func (n *Node) SetContainer(pid int, container sharing.Container) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if container == (sharing.Container{}) {
		delete(n.containers, pid)
		return
	}
	n.containers[pid] = container
}

// Containers returns the containers of the processes by container ID. A real node gets them from
// the API server.
func (n *Node) Containers() (map[string]sharing.Container, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	containers := map[string]sharing.Container{}
	for _, c := range n.containers {
		containers[containerID(c)] = c
	}
	return containers, nil
}

func containerID(c sharing.Container) string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(c.Namespace+"/"+c.Pod+"/"+c.Name)))
}

// Proc returns the files of the host's /proc that identify a process's container: "uptime",
// "self/cgroup", "1/cgroup", and "cgroup", "comm" and "stat" of the processes on the GPUs. It also
// has the open files of the program that has the GPUs open in the world client. It may be read from
// any goroutine.
func (n *Node) Proc() fs.FS { return proc{n} }

type proc struct{ node *Node }

// Open implements fs.FS.
func (p proc) Open(name string) (fs.File, error) {
	files := p.client()
	if text, known := p.read(name); known {
		files[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return files.Open(name)
}

// ReadLink and Lstat implement fs.ReadLinkFS.
func (p proc) ReadLink(name string) (string, error)   { return p.client().ReadLink(name) }
func (p proc) Lstat(name string) (fs.FileInfo, error) { return p.client().Lstat(name) }

// client returns the files in /proc of the program of the world client, if there is one.
func (p proc) client() fstest.MapFS {
	files := fstest.MapFS{}
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	for _, world := range p.node.worlds {
		name, is := strings.CutPrefix(world, "client=")
		if !is || p.node.clientAway {
			continue
		}
		files["812/comm"] = &fstest.MapFile{Data: []byte(name + "\n")}
		files["812/cgroup"] = &fstest.MapFile{Data: []byte("0::/system.slice/" + name + ".service\n")}
		for i, gpu := range p.node.gpus {
			files[fmt.Sprintf("812/fd/%d", i+3)] = &fstest.MapFile{
				Mode: fs.ModeSymlink,
				Data: fmt.Appendf(nil, "/dev/nvidia%d", gpu.deviceMinor),
			}
		}
	}
	return files
}

func (p proc) read(name string) (text string, known bool) {
	switch name {
	case "uptime":
		return "86400.00 86400.00\n", true
	case "self/cgroup":
		return "0::/system.slice/virgate.service\n", true
	case "1/cgroup":
		return "0::/init.scope\n", true
	}
	directory, file := path.Split(name)
	pid, err := strconv.Atoi(path.Clean(directory))
	if err != nil {
		return "", false
	}
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	if !p.node.hasProcess(pid) {
		return "", false
	}
	program := "work"
	if p.node.mps[pid] == mpsServer {
		program = "nvidia-cuda-mps" // The kernel keeps 15 characters of a name.
	}
	switch file {
	case "comm":
		return program + "\n", true
	case "stat":
		return fmt.Sprintf("%d (%s) S 1 %[1]d %[1]d 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 0 0\n", pid, program), true
	case "cgroup":
		return p.node.cgroup(pid), true
	}
	return "", false
}

func (n *Node) hasProcess(pid int) bool {
	return slices.ContainsFunc(n.gpus, func(g *simGPU) bool { return indexOf(g.allProcesses(), pid) >= 0 })
}

func (n *Node) cgroup(pid int) string {
	c, ok := n.containers[pid]
	if !ok {
		return "0::/user.slice/user-1000.slice/session-1.scope\n"
	}
	id := containerID(c)
	return fmt.Sprintf("0::/kubepods.slice/kubepods-pod%s_%s_%s_%s_%s.slice/cri-containerd-%s.scope\n",
		id[:8], id[8:12], id[12:16], id[16:20], id[20:32], id)
}
