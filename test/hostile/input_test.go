package hostile

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/virgate/virgate/test/await"
)

// manifest returns a handwritten ConfigMap with the one document.
func manifest(document string) string {
	return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: profiles}\ndata:\n  a: |\n    " + strings.ReplaceAll(strings.TrimSpace(document), "\n", "\n    ") + "\n"
}

// aliases returns a document of a mebibyte in which each line contains the previous one nine times.
func aliases() string {
	var b strings.Builder
	b.WriteString("l0: &l0 [x]\n")
	for i := 1; b.Len() < 1<<20-200; i++ {
		fmt.Fprintf(&b, "l%d: &l%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*l%d,", i-1), 9), ","))
	}
	return b.String()
}

// resources returns a document that shares this many resources.
func resources(count int, name func(int) string) string {
	var b strings.Builder
	b.WriteString("version: v1\nsharing:\n  timeSlicing:\n    resources:\n")
	for i := range count {
		fmt.Fprintf(&b, "    - {name: %q, replicas: 2}\n", name(i))
	}
	return b.String()
}

// names returns a document with this many models that the node does not have.
func names(count int) string {
	var b strings.Builder
	b.WriteString("version: v1\nresources:\n  gpus:\n")
	for i := range count {
		fmt.Fprintf(&b, "  - {pattern: \"model %d\", name: nvidia.com/r%d}\n", i, i)
	}
	return b.String()
}

// TestHostileProfiles checks that a profile made to be expensive, or to look like something else, is
// refused or served. Meanwhile the node is served, and the log, the page and the status stay short and
// plain.
func TestHostileProfiles(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, profile string
		// state is the expected state of the profile.
		state string
	}{
		{"a mebibyte of nested aliases", aliases(), "rejected"},
		{"a mebibyte of nested aliases in a ConfigMap", manifest(aliases()[:900_000]), "rejected"},
		{"depth", "a: " + strings.Repeat("[", 1<<19), "rejected"},
		{"ten thousand resources of nothing", resources(10_000, func(i int) string { return fmt.Sprintf("nvidia.com/r%d", i) }), "applied"},
		{"ten thousand names", names(10_000), "applied"},
		{"ten thousand resources of one name", resources(10_000, func(int) string { return "nvidia.com/gpu" }), "rejected"},
		{"names with control characters", resources(200, func(i int) string { return fmt.Sprintf("nvidia.com/\x1b[2J\u202e\u2066%d\r\x00\a", i) }), "rejected"},
		{"keys with control characters", "\"\\x1b]0;title\\a\\u202e\": 1\n", "rejected"},
		{"more devices than a list can have", replicas(2_000_000_000), "rejected"},
		{"a file of zeros", strings.Repeat("\x00", 1<<20), "rejected"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := start(t, options{profile: replicas(2)})
			p.shows(gpu, 4)
			before, stop := heap(), peak()
			p.write(test.profile)
			if test.state == "rejected" {
				p.says("/metrics", `virgate_config_state{state="rejected"} 1`)
				p.shows(gpu, 4)
				p.admit("pod")
			} else {
				p.shows(gpu, 2) // The resource is not shared any more.
			}
			if most := stop(); most > before+512<<20 {
				t.Errorf("%d MiB more than before", (most-before)>>20)
			}
			for _, path := range []string{"/status", "/api/v1/status", "/metrics"} {
				body := p.get(path)
				if len(body) > 4<<20 {
					t.Errorf("%s has %d bytes", path, len(body))
				}
				if path == "/status" && strings.ContainsFunc(body, func(r rune) bool {
					return r != '\n' && r != '\t' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
				}) {
					t.Errorf("%s has control characters", path)
				}
			}
			if log := p.log.String(); len(log) > 256<<10 || strings.ContainsAny(log, "\x1b\a\u202e") {
				t.Errorf("the log has %d bytes, or what a terminal obeys", len(log))
			}
			p.write(replicas(3))
			if test.state == "rejected" {
				p.shows(gpu, 6)
			}
		})
	}
}

// disk mounts a file system of 128 KiB, or skips the test where that is not allowed.
func disk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=128k"); err != nil {
		t.Skipf("a small file system cannot be mounted here: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// fill fills the disk.
func fill(t *testing.T, dir string) {
	t.Helper()
	file, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	block := bytes.Repeat([]byte{1}, 4096)
	for err == nil {
		_, err = file.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
}

func remount(t *testing.T, dir string, flags uintptr) {
	t.Helper()
	await.Until(t, "the remount", func() error {
		err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT|flags, "")
		if err != nil && !errors.Is(err, syscall.EBUSY) { // A file is being written.
			return await.Never("%w", err)
		}
		return err
	})
}

// TestDiskThatTakesNothing checks that the node is served, and reports what it lacks, while the disk with
// the state file and the CDI specs is full, and that all is well when the disk has room again.
func TestDiskThatTakesNothing(t *testing.T) {
	t.Parallel()
	const byCDI = "flags: {plugin: {deviceListStrategy: cdi-annotations}}\n"
	for _, test := range []struct {
		name      string
		spoil     func(t *testing.T, dir string)
		mend      func(t *testing.T, dir string)
		complaint string
	}{
		{"full", fill, func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
				t.Fatal(err)
			}
		}, "no space left on device"},
		{"read-only", func(t *testing.T, dir string) { remount(t, dir, syscall.MS_RDONLY) },
			func(t *testing.T, dir string) { remount(t, dir, 0) }, "read-only file system"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := disk(t)
			p := start(t, options{stateDir: dir, cdiDir: filepath.Join(dir, "cdi"), profile: byCDI + replicas(2)})
			p.shows(gpu, 4)
			p.says("/metrics", "virgate_state_last_write_successful 1\n")

			test.spoil(t, dir)
			p.write(byCDI + replicas(3))
			p.shows(gpu, 6)
			p.says("/metrics", "virgate_state_last_write_successful 0\n")
			p.says("/api/v1/status", test.complaint)
			// No runtime finds the entry of a GPU added now; the others serve.
			if _, err := p.node.Add("h100"); err != nil {
				t.Fatal(err)
			}
			p.says("/api/v1/status", "cannot be granted now: 1: it has no CDI entry: write the CDI spec")
			p.shows(gpu, 6)
			if n := strings.Count(p.log.String(), "lists not kept for a restart, serving goes on"); n != 1 {
				t.Errorf("the log says it %d times:\n%s", n, p.log)
			}

			test.mend(t, dir)
			p.shows(gpu, 9)
			p.says("/metrics", "virgate_state_last_write_successful 1\n")
			await.Until(t, "the last write to end", func() error {
				left, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
				if more, _ := filepath.Glob(filepath.Join(dir, "cdi", ".*")); len(left)+len(more) > 0 {
					return fmt.Errorf("left behind: %q %q", left, more)
				}
				return err
			})
		})
	}
}

// frame returns an HTTP/2 frame (RFC 9113, section 4.1).
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	head := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	head = append(head, flags)
	return append(binary.BigEndian.AppendUint32(head, stream), payload...)
}

// field returns a header field with a literal name (RFC 7541, section 6.2.2).
func field(name, value string) []byte {
	text := append([]byte{0, byte(len(name))}, name...)
	return append(append(text, byte(len(value))), value...)
}

const (
	preface  = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	data     = 0
	headers  = 1
	settings = 4
	// endHeaders ends a header block, endStream the client's side of a stream.
	endHeaders, endStream = 4, 1
)

// call returns the header block of a call of the plugin's API, without authority.
func call(method string, more ...[]byte) []byte {
	block := []byte{0x83, 0x86} // POST, http.
	block = append(block, field(":path", "/v1beta1.DevicePlugin/"+method)...)
	for _, f := range more {
		block = append(block, f...)
	}
	block = append(block, field("content-type", "application/grpc")...)
	return append(block, field("te", "trailers")...)
}

// answersOn reports whether headers arrive on the stream before the connection ends or the time is over.
func answersOn(connection net.Conn, stream uint32, patience time.Duration) bool {
	_ = connection.SetReadDeadline(time.Now().Add(patience))
	head := make([]byte, 9)
	for {
		if _, err := io.ReadFull(connection, head); err != nil {
			return false
		}
		length := binary.BigEndian.Uint32(append([]byte{0}, head[:3]...))
		if head[3] == headers && binary.BigEndian.Uint32(head[5:]) == stream {
			return true
		}
		if _, err := io.CopyN(io.Discard, connection, int64(length)); err != nil {
			return false
		}
	}
}

// TestFrames checks that frames which no gRPC client sends end their connection, or are ignored, and that
// the kubelet is served as before.
func TestFrames(t *testing.T) {
	t.Parallel()
	greeting := append([]byte(preface), frame(settings, 0, 0, nil)...)
	var fragments []byte
	for range 20_000 {
		fragments = append(fragments, frame(data, 0, 1, []byte{0})...)
	}
	authority := field(":authority", "localhost")
	for _, test := range []struct {
		name string
		sent []byte
		// answered is true if there must be an answer.
		answered bool
	}{
		{name: "as a client does", sent: append(frame(headers, endHeaders, 1, call("GetDevicePluginOptions", authority)), frame(data, endStream, 1, make([]byte, 5))...), answered: true},
		{name: "no HTTP/2", sent: []byte("GET / HTTP/1.1\r\n\r\n")},
		{name: "a request without authority", sent: frame(headers, endHeaders, 1, call("GetDevicePluginOptions"))},
		{name: "an empty authority", sent: frame(headers, endHeaders, 1, call("GetDevicePluginOptions", field(":authority", "")))},
		{name: "two authorities", sent: frame(headers, endHeaders, 1, call("GetDevicePluginOptions", field(":authority", "a"), field("host", "b"), field("host", "c")))},
		{name: "a path without a slash", sent: frame(headers, endHeaders|endStream, 1, append([]byte{0x83, 0x86}, field(":path", "v1beta1.DevicePlugin/Allocate")...))},
		{name: "no headers", sent: frame(headers, endHeaders|endStream, 1, nil)},
		{name: "headers of another kind", sent: frame(headers, endHeaders, 1, []byte{0xff, 0xff, 0xff, 0xff, 0xff})},
		{name: "an even stream", sent: frame(headers, endHeaders, 2, call("Allocate"))},
		{name: "data of no stream", sent: frame(data, 0, 7, make([]byte, 100))},
		{name: "a message in twenty thousand frames", sent: append(frame(headers, endHeaders, 1, call("Allocate", authority)), fragments...)},
		{name: "a message longer than it says", sent: append(frame(headers, endHeaders, 1, call("Allocate", authority)), frame(data, endStream, 1, []byte{0, 0xff, 0xff, 0xff, 0xff, 1})...)},
		{name: "a message that is no Allocate", sent: append(frame(headers, endHeaders, 1, call("Allocate", authority)), frame(data, endStream, 1, []byte{0, 0, 0, 0, 2, 0xff, 0xff})...)},
		{name: "compressed by nothing known", sent: append(frame(headers, endHeaders, 1, call("Allocate", authority, field("grpc-encoding", "x"))), frame(data, endStream, 1, []byte{1, 0, 0, 0, 0})...)},
		{name: "a time that has no unit", sent: frame(headers, endHeaders|endStream, 1, call("Allocate", authority, field("grpc-timeout", "1")))},
		{name: "settings without end", sent: func() (all []byte) {
			for range 10_000 {
				all = append(all, frame(settings, 0, 0, []byte{0, 4, 0, 0, 0xff, 0xff})...)
			}
			return all
		}()},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := start(t, options{profile: replicas(2)})
			p.shows(gpu, 4)
			before := p.kubelet.Snapshot().Resources[gpu]
			connection := dial(t, "unix", filepath.Join(p.dir, before.Socket))
			_ = connection.SetWriteDeadline(time.Now().Add(5 * time.Second))
			_, _ = connection.Write(append(append([]byte{}, greeting...), test.sent...)) // It may be closed before the end.
			// Without an answer, the connection ends or nothing arrives in time.
			wait := 200 * time.Millisecond
			if test.answered {
				wait = patience
			}
			if answered := answersOn(connection, 1, wait); test.answered && !answered {
				t.Error("no answer")
			}
			p.admit("pod")
			if now := p.kubelet.Snapshot().Resources[gpu]; now.Registrations != before.Registrations || now.Streams != 1 {
				t.Errorf("the kubelet lost its stream: %+v", now)
			}
		})
	}
}

// dial opens a connection that the test closes.
func dial(t *testing.T, network, address string) net.Conn {
	t.Helper()
	connection, err := net.Dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

// isClosed reports whether the other side closes the connection.
func isClosed(connection net.Conn) bool {
	_ = connection.SetReadDeadline(time.Now().Add(patience))
	buffer := make([]byte, 512)
	for {
		if _, err := connection.Read(buffer); err != nil {
			return !errors.Is(err, os.ErrDeadlineExceeded)
		}
	}
}

// heap returns the bytes that the process has in use.
func heap() uint64 {
	runtime.GC()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return memory.HeapAlloc + memory.StackInuse
}

// TestSlowClients checks that clients which begin a request and never end it are limited, and that others
// are answered meanwhile. It runs alone, because it measures the memory of the whole process.
func TestSlowClients(t *testing.T) {
	p := start(t, options{profile: replicas(2)})
	p.shows(gpu, 4)
	before := heap()
	var slow []net.Conn
	for range 1500 {
		connection := dial(t, "tcp", p.address())
		_, _ = fmt.Fprintf(connection, "GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
		slow = append(slow, connection)
	}
	for _, path := range []string{"/healthz", "/readyz", "/status", "/metrics", "/api/v1/status"} {
		if body := p.get(path); body == "" {
			t.Errorf("%s is answered with nothing", path)
		}
	}
	for _, i := range []int{0, 100, 1000} {
		if !isClosed(slow[i]) {
			t.Errorf("slow client %d of 1500 is still waited for", i)
		}
	}
	// Each remaining client costs a goroutine and its buffers.
	if after := heap(); after > before+32<<20 {
		t.Errorf("%d MiB more than before", (after-before)>>20)
	}
	if !isClosed(slow[1499]) {
		t.Error("the last slow client is waited for without end")
	}
}

// TestHugeRequests checks that headers and addresses have a limit, and that bodies are not read.
func TestHugeRequests(t *testing.T) {
	p := start(t, options{profile: replicas(2)})
	p.shows(gpu, 4)
	long := strings.Repeat("x", 1<<20)
	for _, test := range []struct {
		name, request string
		want          int
	}{
		{"a header", "GET /status HTTP/1.1\r\nHost: localhost\r\nX-Long: " + long + "\r\n\r\n", http.StatusRequestHeaderFieldsTooLarge},
		{"an address", "GET /" + long + " HTTP/1.1\r\nHost: x\r\n\r\n", http.StatusRequestHeaderFieldsTooLarge},
		{"a body", "POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + long, http.StatusMethodNotAllowed},
		{"no HTTP", long, http.StatusRequestHeaderFieldsTooLarge},
		{"another protocol", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", http.StatusBadRequest},
	} {
		t.Run(test.name, func(t *testing.T) {
			connection := dial(t, "tcp", p.address())
			go func() { _, _ = connection.Write([]byte(test.request)) }() // The server may not read it to its end.
			_ = connection.SetReadDeadline(time.Now().Add(patience))
			answer, err := http.ReadResponse(bufio.NewReader(connection), nil)
			if err != nil {
				t.Fatal(err)
			}
			_ = answer.Body.Close()
			if answer.StatusCode != test.want {
				t.Errorf("answered %s, want %d", answer.Status, test.want)
			}
		})
	}
	p.shows(gpu, 4)
}
