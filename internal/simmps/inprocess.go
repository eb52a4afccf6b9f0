package simmps

import (
	"context"
	"log/slog"
	"sync"

	"github.com/virgate/virgate/internal/mps"
)

// InProcess runs daemons as goroutines. It is an mps.Control.
type InProcess struct {
	// Servers starts and stops servers, and learns of their clients.
	Servers Servers
	// MultiUser is the same as in mps.Program.
	MultiUser bool

	mu      sync.Mutex
	daemons map[string]*goroutine
}

// goroutine runs a daemon and its server. The server outlives a daemon that is killed.
type goroutine struct {
	Servers
	*mps.Output
	kill  context.CancelFunc
	ended chan struct{}
	err   error

	mu     sync.Mutex
	server int
}

func (g *goroutine) Ended() <-chan struct{} { return g.ended }
func (g *goroutine) Err() error             { return g.err }

// Start and Stop implement Servers.
func (g *goroutine) Start(device string) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var err error
	g.server, err = g.Servers.Start(device)
	return g.server, err
}

func (g *goroutine) Stop(device string, _ int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.server != 0 {
		g.Servers.Stop(device, g.server)
	}
	g.server = 0
}

func environment(env mps.Environment) Environment {
	return Environment{
		Device: env.Device,
		Pipe:   env.Pipe,
		Log:    env.Log,
		Shm:    env.Shm,
	}
}

// Start implements mps.Control.
func (p *InProcess) Start(env mps.Environment) (mps.Daemon, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	ctx, kill := context.WithCancel(context.Background())
	g := &goroutine{
		Servers: p.Servers,
		Output:  mps.NewOutput(slog.New(slog.DiscardHandler)),
		kill:    kill,
		ended:   make(chan struct{}),
	}
	if p.daemons == nil {
		p.daemons = map[string]*goroutine{}
	}
	p.daemons[env.Pipe] = g
	started := environment(env)
	started.MultiUser = p.MultiUser
	go func() {
		defer close(g.ended)
		g.err = serve(ctx, started, g, g.Output)
	}()
	return g, nil
}

// Ask implements mps.Control.
func (p *InProcess) Ask(ctx context.Context, env mps.Environment, command string) (string, error) {
	return ask(ctx, environment(env), command)
}

// Clear implements mps.Control.
func (p *InProcess) Clear(_ context.Context, env mps.Environment) error {
	p.mu.Lock()
	g := p.daemons[env.Pipe]
	delete(p.daemons, env.Pipe)
	p.mu.Unlock()
	if g != nil {
		g.kill()
		<-g.ended
		g.Stop(env.Device, 0)
	}
	return nil
}
