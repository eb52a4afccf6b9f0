package hostile

import (
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/virgate/virgate/test/await"
)

// TestPeerThatIsNoKubelet has something other than a kubelet listen on kubelet.sock. The program keeps
// trying, at bounded cost and with a bounded log, reports that it is not ready, and registers once a
// kubelet listens.
func TestPeerThatIsNoKubelet(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		// serve handles one connection.
		serve func(net.Conn)
		// tries is how often the program must come before a kubelet takes over.
		tries int64
	}{
		{"closes at once", func(c net.Conn) {}, 4},
		{"says nothing", func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }, 1},
		{"talks nonsense", func(c net.Conn) { _, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n<html>\x1b[2J") }, 4},
		{"does not end", func(c net.Conn) { _, _ = io.Copy(c, rand.Reader) }, 4},
		{"does not end its greeting", func(c net.Conn) {
			// An HTTP/2 frame with 16 MiB of settings.
			_, _ = c.Write([]byte{0xff, 0xff, 0xff, 4, 0, 0, 0, 0, 0})
			_, _ = io.Copy(c, rand.Reader)
		}, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := start(t, options{profile: replicas(2), noKubelet: true})
			listener, err := net.Listen("unix", filepath.Join(p.dir, "kubelet.sock"))
			if err != nil {
				t.Fatal(err)
			}
			var came atomic.Int64
			go func() {
				for {
					connection, err := listener.Accept()
					if err != nil {
						return
					}
					came.Add(1)
					go func() {
						test.serve(connection)
						_ = connection.Close()
					}()
				}
			}()
			p.survives(func() bool { return came.Load() >= test.tries })
			_ = listener.Close()
		})
	}
}

// survives waits until so is true, checks the program while it has no kubelet, and lets a kubelet take
// over.
func (p *program) survives(so func() bool) {
	p.t.Helper()
	await.Until(p.t, "the program to come again", func() error {
		if !so() {
			return fmt.Errorf("its log is\n%s", p.log)
		}
		return nil
	})
	p.says("/readyz", "nvidia.com/gpu: not registered with the kubelet")
	p.says("/healthz", "ok")
	if n := p.goroutines(); n < 10 || n > 100 {
		p.t.Errorf("%d goroutines", n)
	}
	if lines := strings.Count(p.log.String(), "\n"); lines > 200 {
		p.t.Errorf("the log has %d lines:\n%s", lines, p.log)
	}
	p.t.Cleanup(func() { _ = p.kubelet.Stop(p.t.Context()) })
	if err := p.kubelet.Start(p.ctx); err != nil {
		p.t.Fatal(err)
	}
	p.shows(gpu, 4)
}

// TestPeerThatAnswersNonsense runs gRPC servers that answer Register wrongly.
func TestPeerThatAnswersNonsense(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		answer func(stream grpc.ServerStream) error
	}{
		{"success, and never dials back", func(stream grpc.ServerStream) error { return stream.SendMsg(&emptypb.Empty{}) }},
		{"an error with a long text", func(grpc.ServerStream) error {
			return status.Error(codes.Unknown, strings.Repeat("\x1b[31m no ", 1000))
		}},
		{"more than a message may have", func(stream grpc.ServerStream) error {
			unknown := &emptypb.Empty{}
			unknown.ProtoReflect().SetUnknown(append([]byte{0x0a, 0x80, 0x80, 0x80, 0x08}, make([]byte, 16<<20)...))
			return stream.SendMsg(unknown)
		}},
		{"several answers", func(stream grpc.ServerStream) error {
			for range 1000 {
				if err := stream.SendMsg(&emptypb.Empty{}); err != nil {
					return err
				}
			}
			return nil
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := start(t, options{profile: replicas(2), noKubelet: true})
			listener, err := net.Listen("unix", filepath.Join(p.dir, "kubelet.sock"))
			if err != nil {
				t.Fatal(err)
			}
			var came atomic.Int64
			server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
				came.Add(1)
				if err := stream.RecvMsg(&emptypb.Empty{}); err != nil {
					return err
				}
				return test.answer(stream)
			}))
			go func() { _ = server.Serve(listener) }()
			p.survives(func() bool { return came.Load() >= 2 })
			server.Stop()
		})
	}
}
