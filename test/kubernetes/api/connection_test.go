package api

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/policy/report"
)

// testOneConnection: what reads and what writes, each with a configuration of its
// own as in the program, share one connection to the API server.
func testOneConnection(t *testing.T, s *server) {
	s.setNode("one", "a")
	s.setProfiles(map[string]string{"a": document("2")})
	kubeconfig := filepath.Join(t.TempDir(), "config")
	// The name keeps it apart from the tests' own connections.
	write(t, kubeconfig, fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: c, cluster: {server: "https://127.0.0.1:%d", insecure-skip-tls-verify: true, tls-server-name: one-connection}}],
users: [{name: u, user: {token: %s}}], contexts: [{name: c, context: {cluster: c, user: u}}]}`, s.port, virgateToken))
	before := s.connections()
	read, err := policy.APIConfig(kubeconfig)
	s.must(err)
	f := s.followBy(t, "one", virgateToken, func(f *follower) {
		api, err := policy.NewAPI(read)
		s.must(err)
		log := slog.New(slog.DiscardHandler)
		f.policy.Shelf, f.policy.Labels = policy.NewConfigMap(api, namespace, configMap, log), policy.NewLabels(api, "one", label, log)
		f.config, err = policy.APIConfig(kubeconfig)
		s.must(err)
		f.tell(t, "one")
	})
	f.awaits(t, is(t, "a", document("2")), "")
	s.await(startTimeout, "the Node to say so", func() bool {
		return s.node("one").Labels[report.StateLabel] == "applied" && len(s.told("one", "")) == 1
	})
	// One that lost a race is closed at once.
	s.await(startTimeout, "one connection", func() bool { return s.connections()-before == 1 })
}

// connections are those that this process has to the server.
func (s *server) connections() int {
	s.t.Helper()
	data, err := os.ReadFile("/proc/self/net/tcp")
	s.must(err)
	count := 0
	for line := range strings.Lines(string(data)) {
		const remote, state, established = 2, 3, "01" // columns, proc_pid_net(5)
		fields := strings.Fields(line)
		if len(fields) > state && strings.HasSuffix(fields[remote], fmt.Sprintf(":%04X", s.port)) && fields[state] == established {
			count++
		}
	}
	return count
}
