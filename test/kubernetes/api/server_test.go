package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/test/await"
	"go.etcd.io/etcd/server/v3/embed"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	"sigs.k8s.io/yaml"
)

// asServer makes this test binary an API server, or a scheduler with that value.
const asServer = "VIRGATE_TEST_API_SERVER"

func TestMain(m *testing.M) {
	if os.Getenv(asServer) != "" {
		go func() { // The server ends with its test, even if that is killed.
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(1)
		}()
		if os.Getenv(asServer) == "scheduler" {
			os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
		}
		os.Exit(cli.Run(app.NewAPIServerCommand()))
	}
	os.Exit(m.Run())
}

const adminToken, virgateToken, strangerToken = "admin-token", "virgate-token", "stranger-token"

// server is an API server with its etcd.
type server struct {
	t       *testing.T
	dir     string
	port    int
	etcd    *url.URL
	flags   []string
	process *exec.Cmd
	admin   *kubernetes.Clientset
}

// startServer starts both, the API server with these additional flags, and stops them at the end of the
// test.
func startServer(t *testing.T, flags ...string) *server {
	t.Helper()
	s := &server{t: t, dir: t.TempDir(), port: freePort(t), flags: flags}
	s.startEtcd()
	write(t, filepath.Join(s.dir, "tokens.csv"), adminToken+`,admin,1,"system:masters"
`+virgateToken+`,virgate,2,"system:serviceaccounts"
`+strangerToken+",stranger,3\n")
	writeKey(t, s.path("accounts.key"))
	s.start()
	admin, err := kubernetes.NewForConfig(s.config(adminToken))
	if err != nil {
		t.Fatal(err)
	}
	s.admin = admin
	return s
}

func (s *server) path(name string) string { return filepath.Join(s.dir, name) }

// config returns a configuration that logs in with the token.
func (s *server) config(token string) *rest.Config {
	return &rest.Config{
		Host: "https://127.0.0.1:" + strconv.Itoa(s.port), BearerToken: token, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}, // The server signs its own certificate.
	}
}

func (s *server) startEtcd() {
	s.t.Helper()
	config := embed.NewConfig()
	config.Dir, config.LogLevel, config.LogOutputs = s.path("etcd"), "error", []string{s.path("etcd.log")}
	config.UnsafeNoFsync = true
	local := func() url.URL {
		return url.URL{Scheme: "http", Host: "127.0.0.1:" + strconv.Itoa(freePort(s.t))}
	}
	client, peer := local(), local()
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(etcd.Close)
	select {
	case <-etcd.Server.ReadyNotify():
	case err := <-etcd.Err():
		s.t.Fatal(err)
	}
	s.etcd = &client
}

// start starts the API server and waits until it is ready.
func (s *server) start() {
	s.t.Helper()
	log, err := os.OpenFile(s.path("server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	s.process = exec.Command(self, append([]string{
		"--etcd-servers=" + s.etcd.String(), "--cert-dir=" + s.path("certificates"),
		"--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(s.port), "--endpoint-reconciler-type=none",
		"--authorization-mode=RBAC", "--token-auth-file=" + s.path("tokens.csv"), "--anonymous-auth=false",
		"--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://accounts.test",
		"--service-account-signing-key-file=" + s.path("accounts.key"), "--service-account-key-file=" + s.path("accounts.key"),
		"--disable-admission-plugins=ServiceAccount", "--enable-admission-plugins=ExtendedResourceToleration", "--shutdown-delay-duration=0s",
	}, s.flags...)...)
	s.process.Env = append(os.Environ(), asServer+"=1")
	s.process.Stdout, s.process.Stderr = log, log
	_, err = s.process.StdinPipe()
	if err == nil {
		err = s.process.Start()
	}
	_ = log.Close()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(s.stop)
	client, err := rest.HTTPClientFor(s.config(adminToken))
	if err != nil {
		s.t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	s.await("the API server to be ready", func() bool {
		request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.config("").Host+"/readyz", nil)
		if err != nil {
			return false
		}
		answer, err := client.Do(request)
		if err != nil {
			return false
		}
		defer func() { _ = answer.Body.Close() }()
		return answer.StatusCode == http.StatusOK
	})
}

// stop kills the API server, like a machine that fails. A second call does nothing.
func (s *server) stop() {
	if s.process == nil || s.process.Process == nil {
		return
	}
	_ = s.process.Process.Kill()
	_ = s.process.Wait()
	s.process = nil
	if s.t.Failed() {
		if log, err := os.ReadFile(s.path("server.log")); err == nil {
			s.t.Logf("API server's log ends:\n%s", log[max(0, len(log)-2000):])
		}
	}
}

// await waits for the condition.
func (s *server) await(what string, condition func() bool) {
	s.t.Helper()
	await.True(s.t, what, condition)
}

// since is how long it has been.
func since(began time.Time) time.Duration {
	return time.Since(began).Round(time.Millisecond) //nolint:forbidigo // for the report: no test is judged by it
}

// freePort returns a port below those of outgoing connections (ip(7), ip_local_port_range): one of those
// could take it while a server restarts.
func freePort(t *testing.T) int {
	t.Helper()
	for {
		port := 20_000 + rand.IntN(12_000)
		listener, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err == nil {
			err = listener.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		return port
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// tick is the unit of processor time in /proc (proc_pid_stat(5)); Linux has 100 a
// second on every platform that Go knows.
const tick = 10 * time.Millisecond

func (s *server) proc(file string) []byte {
	s.t.Helper()
	data, err := os.ReadFile("/proc/" + strconv.Itoa(s.process.Process.Pid) + "/" + file)
	s.must(err)
	return data
}

// cpu is the processor time that the server has used, with all its threads and the kernel on its behalf.
func (s *server) cpu() time.Duration {
	s.t.Helper()
	stat := s.proc("stat")
	// The second field, a name in parentheses, may contain spaces.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const user, system = 14 - 3, 15 - 3 // numbered as in the manual, from the third field
	total := time.Duration(0)
	for _, field := range []int{user, system} {
		ticks, err := strconv.Atoi(fields[field])
		s.must(err)
		total += time.Duration(ticks) * tick
	}
	return total
}

// memory is the server's memory right after a garbage collection.
type memory struct {
	// resident and heap are bytes.
	resident, heap float64
	goroutines     float64
}

func (s *server) memory() memory {
	s.t.Helper()
	_, err := s.admin.RESTClient().Get().AbsPath("/debug/pprof/heap").Param("gc", "1").DoRaw(s.t.Context())
	s.must(err)
	m := memory{heap: s.metric("go_memstats_heap_alloc_bytes"), goroutines: s.metric("go_goroutines")}
	for line := range strings.Lines(string(s.proc("status"))) {
		if fields := strings.Fields(line); fields[0] == "VmRSS:" {
			kibibytes, err := strconv.ParseFloat(fields[1], 64)
			s.must(err)
			m.resident = kibibytes * 1024
		}
	}
	return m
}

// metric returns the sum of the server's series of that name.
func (s *server) metric(name string) float64 {
	s.t.Helper()
	exposition, err := s.admin.RESTClient().Get().AbsPath("/metrics").DoRaw(s.t.Context())
	s.must(err)
	sum := 0.0
	for line := range strings.Lines(string(exposition)) {
		if rest, ok := strings.CutPrefix(line, name); ok && strings.ContainsAny(rest[:1], "{ ") {
			value, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' '):]), 64)
			s.must(err)
			sum += value
		}
	}
	return sum
}

func (s *server) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// setNode creates or labels a Node; "" removes the label.
func (s *server) setNode(name, profile string) {
	s.t.Helper()
	nodes := s.admin.CoreV1().Nodes()
	if _, err := nodes.Get(s.t.Context(), name, metav1.GetOptions{}); err != nil {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
		if profile != "" {
			node.Labels[label] = profile
		}
		_, err := nodes.Create(s.t.Context(), node, metav1.CreateOptions{})
		s.must(err)
		return
	}
	var value any
	if profile != "" {
		value = profile
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{label: value}}})
	s.must(err)
	_, err = nodes.Patch(s.t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
	s.must(err)
}

func (s *server) removeNode(name string) {
	s.t.Helper()
	s.must(s.admin.CoreV1().Nodes().Delete(s.t.Context(), name, metav1.DeleteOptions{}))
}

// setProfiles makes the ConfigMap hold exactly the documents.
func (s *server) setProfiles(documents map[string]string) {
	s.t.Helper()
	maps := s.admin.CoreV1().ConfigMaps(namespace)
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: configMap}, Data: documents}
	if _, err := maps.Update(s.t.Context(), object, metav1.UpdateOptions{}); err != nil {
		_, err = maps.Create(s.t.Context(), object, metav1.CreateOptions{})
		s.must(err)
	}
}

func (s *server) removeProfiles() {
	s.t.Helper()
	s.must(s.admin.CoreV1().ConfigMaps(namespace).Delete(s.t.Context(), configMap, metav1.DeleteOptions{}))
}

// allow gives the user virgate the chart's rights.
func (s *server) allow() {
	s.t.Helper()
	_, err := s.admin.CoreV1().Namespaces().Create(s.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	s.must(err)
	s.createRole("virgate", "clusterrole.yaml")
	s.bind("virgate", "virgate", user("virgate"))
	access := s.admin.RbacV1()
	_, err = access.Roles(namespace).Create(s.t.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "virgate"},
		Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{configMap},
			Verbs: []string{"get", "list", "watch"},
		}},
	}, metav1.CreateOptions{})
	s.must(err)
	_, err = access.RoleBindings(namespace).Create(s.t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "virgate"}, Subjects: []rbacv1.Subject{user("virgate")},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "virgate"},
	}, metav1.CreateOptions{})
	s.must(err)
	s.awaitRights(true)
}

// awaitRights waits until the server lets the user virgate read Nodes and, if profiles is true, the
// profiles. The server learns of roles and bindings later than their writers.
func (s *server) awaitRights(profiles bool) {
	s.t.Helper()
	may := func(what authorizationv1.ResourceAttributes) bool {
		what.Verb = "list"
		review, err := s.admin.AuthorizationV1().SubjectAccessReviews().Create(s.t.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{User: "virgate", ResourceAttributes: &what},
		}, metav1.CreateOptions{})
		s.must(err)
		return review.Status.Allowed
	}
	s.await("the server to know the rights", func() bool {
		return may(authorizationv1.ResourceAttributes{Resource: "nodes"}) &&
			may(authorizationv1.ResourceAttributes{Resource: "configmaps", Namespace: namespace, Name: configMap}) == profiles
	})
}

// createRole creates the ClusterRole of a file of the chart.
func (s *server) createRole(name, file string) {
	s.t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}}
	data, err := os.ReadFile("../../../charts/virgate/files/" + file)
	s.must(err)
	s.must(yaml.UnmarshalStrict(data, role))
	_, err = s.admin.RbacV1().ClusterRoles().Create(s.t.Context(), role, metav1.CreateOptions{})
	s.must(err)
}

// bind gives the ClusterRole to the subject, by a binding of that name.
func (s *server) bind(name, role string, subject rbacv1.Subject) {
	s.t.Helper()
	_, err := s.admin.RbacV1().ClusterRoleBindings().Create(s.t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Subjects: []rbacv1.Subject{subject},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
	}, metav1.CreateOptions{})
	s.must(err)
}

func user(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: name}
}

// reset removes what tests made.
func (s *server) reset() {
	s.t.Helper()
	all := metav1.ListOptions{}
	s.must(s.admin.CoreV1().Nodes().DeleteCollection(s.t.Context(), metav1.DeleteOptions{}, all))
	s.must(s.admin.CoreV1().ConfigMaps(namespace).DeleteCollection(s.t.Context(), metav1.DeleteOptions{}, all))
}

// cluster starts a server where the user virgate has its rights.
func cluster(t *testing.T) *server {
	t.Helper()
	s := startServer(t)
	s.allow()
	return s
}

// TestAPI runs all parts on one API server, because starting it takes longest. Each part begins without
// Nodes and without a ConfigMap.
func TestAPI(t *testing.T) {
	s := cluster(t)
	for _, part := range []struct {
		name string
		play func(*testing.T, *server)
	}{
		{"choice", testChoice},
		{"no label", testNoLabel},
		{"refused", testRefused},
		{"allowed", testAllowed},
		{"cut off", testCutOff},
		{"rights taken", testRightsTaken},
		{"pods", testPods},
		{"share policies", testSharePolicies},
		{"GPUs need a request", testGPUsNeedRequest},
		{"kubelet", testKubelet},
		{"MIG label", testMIGLabel},
		{"rules", testRules},
		{"list limit", testListLimit},
		{"one connection", testOneConnection},
		{"scheduling", testScheduling},
		{"200 nodes", testManyNodes},
		{"cluster", testClusterView},
		{"rollouts", testRollouts},
		{"forecast", testForecast},
		{"DRA slices", testDRASlices},
		{"DRA kubelet", testDRAKubelet},
		{"DRA rights", testDRARights},
		{"DRA nodes", testDRANodes},
		{"server restarts", testServerRestarts},
	} {
		t.Run(part.name, func(t *testing.T) {
			whole := s.t
			s.t = t
			defer func() { s.t = whole }()
			s.reset()
			part.play(t, s)
		})
	}
}
