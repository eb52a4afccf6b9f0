package hostile

import (
	"encoding/binary"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// frame is one of HTTP/2 (RFC 9113, section 4.1).
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	head := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	head = append(head, flags)
	return append(binary.BigEndian.AppendUint32(head, stream), payload...)
}

// field is a header field with a name of its own (RFC 7541, section 6.2.2).
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

// call is the header block of a call of the plugin's API, but for authority.
func call(method string, more ...[]byte) []byte {
	block := []byte{0x83, 0x86} // POST, http.
	block = append(block, field(":path", "/v1beta1.DevicePlugin/"+method)...)
	for _, f := range more {
		block = append(block, f...)
	}
	block = append(block, field("content-type", "application/grpc")...)
	return append(block, field("te", "trailers")...)
}

// answersOn says that headers come on the stream before the connection ends or
// the time is over.
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

// TestFrames holds that frames which no gRPC client sends end the connection that
// they come on, or are ignored, and that the kubelet is served as before.
func TestFrames(t *testing.T) {
	greeting := append([]byte(preface), frame(settings, 0, 0, nil)...)
	var fragments []byte
	for range 20_000 {
		fragments = append(fragments, frame(data, 0, 1, []byte{0})...)
	}
	authority := field(":authority", "localhost")
	for _, test := range []struct {
		name string
		sent []byte
		// answered says that there must be an answer.
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
			// What is not answered ends the connection, or is waited for in vain.
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
