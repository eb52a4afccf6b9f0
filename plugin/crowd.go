package plugin

import (
	"context"
	"net"
	"slices"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"
)

// crowd is a listener with a bound on how many connections it has open: the
// newest is always let in, and in its place the oldest goes that nobody keeps.
// So whoever hoards connections hoards few, and cannot keep the kubelet out.
type crowd struct {
	net.Listener
	most int

	mu sync.Mutex
	// guests are the open connections, oldest first.
	guests []*guest
}

// LimitConnections returns the listener with a bound on its open connections:
// when there are more than most the oldest is closed, and the newest is let in.
func LimitConnections(listener net.Listener, most int) net.Listener {
	return &crowd{Listener: listener, most: most}
}

// guest is a connection of a crowd.
type guest struct {
	net.Conn
	crowd *crowd
	// keeps counts the streams that keep it open; the crowd's mutex is held.
	keeps int
}

// Accept implements net.Listener.
func (c *crowd) Accept() (net.Conn, error) {
	connection, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	g := &guest{Conn: connection, crowd: c}
	if out := c.admit(g); out != nil {
		_ = out.Close()
	}
	return g, nil
}

// admit returns the guest that has to go, nil for none.
func (c *crowd) admit(g *guest) *guest {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out *guest
	if i := slices.IndexFunc(c.guests, func(g *guest) bool { return g.keeps == 0 }); i >= 0 && len(c.guests) >= c.most {
		out = c.guests[i]
	}
	c.guests = append(c.guests, g)
	return out
}

// Close implements net.Conn.
func (g *guest) Close() error {
	g.crowd.mu.Lock()
	g.crowd.guests = slices.DeleteFunc(g.crowd.guests, func(other *guest) bool { return other == g })
	g.crowd.mu.Unlock()
	return g.Conn.Close()
}

// keep has the crowd keep the connection on which the call came, until the
// returned function is called.
func keep(ctx context.Context) (release func()) {
	from, _ := peer.FromContext(ctx)
	if from == nil {
		return func() {}
	}
	known, ok := from.AuthInfo.(introduction)
	if !ok {
		return func() {}
	}
	known.guest.add(1)
	return func() { known.guest.add(-1) }
}

func (g *guest) add(n int) {
	g.crowd.mu.Lock()
	defer g.crowd.mu.Unlock()
	g.keeps += n
}

// introduction tells a call which connection it came on. gRPC has no other way
// to say it: a client of a Unix socket has no address.
type introduction struct {
	credentials.CommonAuthInfo
	guest *guest
}

// AuthType implements credentials.AuthInfo.
func (introduction) AuthType() string { return "none" }

// introducing are the credentials of a server that asks for none.
type introducing struct {
	credentials.TransportCredentials
}

func newIntroducing() introducing { return introducing{insecure.NewCredentials()} }

// ServerHandshake implements credentials.TransportCredentials.
func (i introducing) ServerHandshake(connection net.Conn) (net.Conn, credentials.AuthInfo, error) {
	g, ok := connection.(*guest)
	if !ok {
		return i.TransportCredentials.ServerHandshake(connection)
	}
	return connection, introduction{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}, g}, nil
}

// Clone implements credentials.TransportCredentials.
func (i introducing) Clone() credentials.TransportCredentials {
	return introducing{i.TransportCredentials.Clone()}
}
