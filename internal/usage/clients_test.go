package usage

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// guarded is a /proc in which the open files of some processes cannot be listed, or not be read.
type guarded struct {
	fstest.MapFS
	unlisted, unread string
}

func (g guarded) Open(name string) (fs.File, error) {
	if name == g.unlisted+"/fd" {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return g.MapFS.Open(name)
}

func (g guarded) ReadLink(name string) (string, error) {
	if name == "self" {
		return "77", nil
	}
	if strings.HasPrefix(name, g.unread+"/fd/") {
		return "", &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrPermission}
	}
	return g.MapFS.ReadLink(name)
}

func link(to string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink} }

func TestClients(t *testing.T) {
	// process adds a process that has those files open.
	process := func(proc fstest.MapFS, pid int, name string, files ...string) {
		proc[fmt.Sprintf("%d/comm", pid)] = text(name + "\n")
		for i, file := range files {
			proc[fmt.Sprintf("%d/fd/%d", pid, i)] = link(file)
		}
	}
	const gpu1, gpu11 = "/dev/nvidia1", "/dev/nvidia11"
	for _, test := range []struct {
		name             string
		change           func(fstest.MapFS)
		unlisted, unread string
		want             []string
		err              string
	}{
		{name: "nobody"},
		{
			name: "a program of the host, one of a pod, and others",
			change: func(proc fstest.MapFS) {
				process(proc, 100, "nv-hostengine", "/dev/null", "/dev/nvidiactl", "/run/nvidia/driver"+gpu1, gpu1)
				process(proc, 9, "dcgm-exporter", gpu1)
				proc["9/cgroup"] = inPod(id)
				process(proc, 12, "other", gpu11, "/dev/nvidia-uvm", "socket:[1]")
			},
			want: []string{"dcgm-exporter (PID 9, of the pod with the UID " + uid + ")", "nv-hostengine (PID 100)"},
		},
		{
			name: "this program", change: func(proc fstest.MapFS) {
				process(proc, 77, "virgate", gpu1)
			},
		},
		{name: "a PID namespace of one's own", change: func(proc fstest.MapFS) { proc["1/cgroup"] = inPod(id) }, err: "hostPID"},
		{
			name: "one of very many files", change: func(proc fstest.MapFS) {
				process(proc, 13, "dcgm", slices.Repeat([]string{"/dev/null"}, 5000)...)
				proc["13/fd/99999"] = link(gpu1) // A MapFS lists it last.
			},
			want: []string{"dcgm (PID 13)"},
		},
		{
			name: "not to be listed, and no usual program", unlisted: "12",
			change: func(proc fstest.MapFS) { process(proc, 12, "sshd", gpu1) },
			err:    "the open files of 1 processes may not be read, which requires SYS_PTRACE",
		},
		{
			name: "not to be read, and a usual program", unread: "12", unlisted: "14",
			change: func(proc fstest.MapFS) {
				process(proc, 12, "nvidia-persiste", gpu1)
				process(proc, 14, "dcgm-exporter", gpu1)
			},
			err: "the open files of 2 processes may not be read, which requires SYS_PTRACE; among them are nvidia-persiste (PID 12), dcgm-exporter (PID 14)",
		},
		{
			name: "one of two may be read", unread: "12",
			change: func(proc fstest.MapFS) {
				process(proc, 12, "sshd", gpu1)
				process(proc, 13, "dcgm", gpu1)
			},
			want: []string{"dcgm (PID 13)"}, err: "SYS_PTRACE",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			proc := host()
			if test.change != nil {
				test.change(proc)
			}
			got, err := Clients(guarded{proc, test.unlisted, test.unread}, 1)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("clients (-want +got):\n%s", diff)
			}
			if (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want %q", err, test.err)
			}
		})
	}
}

// TestClientsAreBounded checks that a host with very many open files is not read to the end.
func TestClientsAreBounded(t *testing.T) {
	proc := host()
	for file := range 20 {
		proc[fmt.Sprintf("%d/fd/%d", 1000+file/5, file)] = link("/dev/null")
	}
	proc["5000/fd/1"] = link("/dev/nvidia1")
	for left, found := range map[int]bool{20: false, 22: true} {
		got, err := openBy(proc, "nvidia1", left)
		if found != (len(got) == 1) || found != (err == nil) {
			t.Errorf("with %d: %v, %v", left, got, err)
		}
	}
}

// TestClientsOfThisMachine checks that the kernel's own /proc is parsed correctly.
func TestClientsOfThisMachine(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "nvidia7654321"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), "cat")
	child.Stdin, child.ExtraFiles = reader, []*os.File{file}
	if err := child.Start(); err != nil {
		t.Skip(err)
	}
	got, err := openBy(os.DirFS("/proc"), "nvidia7654321", 1<<30)
	if want := fmt.Sprintf("cat (PID %d", child.Process.Pid); len(got) != 1 || !strings.HasPrefix(got[0], want) {
		t.Errorf("%q (%v), want %s", got, err, want)
	}
	if err := errors.Join(reader.Close(), writer.Close(), child.Wait()); err != nil {
		t.Error(err)
	}
}
