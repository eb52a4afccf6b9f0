package simnode

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Contain says that the process runs in the container; the zero Container that
// it runs on the host itself.
func (n *Node) Contain(pid int, container sharing.Container) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if container == (sharing.Container{}) {
		delete(n.containers, pid)
		return
	}
	n.containers[pid] = container
}

// Containers are the containers of the processes, by container ID, as the API
// server tells them of a real node.
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

// Proc is the host's /proc as far as one needs it to find a process's container:
// "uptime", "self/cgroup", "1/cgroup", and "cgroup" and "stat" of the processes
// on the boards. It may be read from any goroutine.
func (n *Node) Proc() fs.FS { return proc{n} }

type proc struct{ node *Node }

// Open implements fs.FS.
func (p proc) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	text, known := p.read(name)
	if !known {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return &procFile{name: path.Base(name), Reader: bytes.NewReader([]byte(text))}, nil
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
	if !p.node.runs(pid) {
		return "", false
	}
	switch file {
	case "stat":
		return fmt.Sprintf("%d (work) S 1 %[1]d %[1]d 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 0 0\n", pid), true
	case "cgroup":
		return p.node.cgroup(pid), true
	}
	return "", false
}

// runs says that the process is on a board.
func (n *Node) runs(pid int) bool {
	for _, b := range n.boards {
		for _, process := range b.allProcesses() {
			if process.PID == pid {
				return true
			}
		}
	}
	return false
}

func (n *Node) cgroup(pid int) string {
	c, contained := n.containers[pid]
	if !contained {
		return "0::/user.slice/user-1000.slice/session-1.scope\n"
	}
	id := containerID(c)
	return fmt.Sprintf("0::/kubepods.slice/kubepods-pod%s_%s_%s_%s_%s.slice/cri-containerd-%s.scope\n",
		id[:8], id[8:12], id[12:16], id[16:20], id[20:32], id)
}

// procFile is a file of proc.
type procFile struct {
	name string
	*bytes.Reader
}

func (f *procFile) Close() error               { return nil }
func (f *procFile) Stat() (fs.FileInfo, error) { return procInfo{f}, nil }

// procInfo says what is to be said of a file of proc.
type procInfo struct{ file *procFile }

func (i procInfo) Name() string       { return i.file.name }
func (i procInfo) Size() int64        { return i.file.Size() }
func (i procInfo) Mode() fs.FileMode  { return 0o444 }
func (i procInfo) ModTime() time.Time { return time.Time{} }
func (i procInfo) IsDir() bool        { return false }
func (i procInfo) Sys() any           { return nil }
