package e2e

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/virgate/virgate/test/await"
)

// cluster is a Kubernetes cluster of one node, with everything that tests have installed on it.
type cluster struct {
	work, tools string
	config      *rest.Config
	client      *kubernetes.Clientset

	apiServer, containerd, kubelet *component

	// pods are the pods that tests have created, by name. created has their names, by the test that removes
	// them when it ends.
	pods    map[string]*v1.Pod
	created map[*testing.T][]string
	report  *report
	// restartsExpected is true if the test itself ends Virgate.
	restartsExpected bool
	// kubeletBug lets keepKubelet start the kubelet again; kubeletDeaths counts how often it did.
	kubeletBug    bool
	kubeletDeaths int
}

// errNotYet means that a condition does not hold yet, without details.
var errNotYet = errors.New("not yet")

// startCluster starts the cluster and stops it at the end of the test.
func startCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{work: os.Getenv(workFolder), tools: os.Getenv(toolsFolder), pods: map[string]*v1.Pod{}, created: map[*testing.T][]string{}, report: &report{started: time.Now()}}
	c.report.step("control plane", func() { c.startControlPlane(t) })
	if version, err := c.client.ServerVersion(); err != nil || version.Major != "1" {
		t.Fatalf("version %v, %v: run by make e2e, which says which it is", version, err)
	}
	c.report.step("node ready", func() { c.startNode(t) })
	return c
}

// ready returns an error until the API server is ready. The first call also makes the client.
func (c *cluster) ready() error {
	if c.client == nil {
		config, err := clientcmd.BuildConfigFromFlags("", c.path("admin.conf"))
		if err != nil {
			return err
		}
		config.QPS = -1
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return err // The API server has not written its certificate yet.
		}
		c.config, c.client = config, client
	}
	var code int
	if err := c.client.RESTClient().Get().AbsPath("/readyz").Do(context.Background()).StatusCode(&code).Error(); err != nil {
		return err
	}
	if code != http.StatusOK {
		return errNotYet
	}
	return nil
}

// component is a process of the cluster, which tests stop and start.
type component struct {
	name    string
	log     string
	command func() *exec.Cmd
	running *exec.Cmd
	ended   chan struct{}
	stopped bool  // by the test
	from    int64 // where its log begins since the last start
}

// component starts a process that ends with the test; its log is shown if the
// test fails.
func (c *cluster) component(t *testing.T, name string, command func() *exec.Cmd) *component {
	t.Helper()
	started := &component{name: name, log: filepath.Join(c.work, name+".log"), command: command}
	started.start(t)
	t.Cleanup(func() {
		started.stop(syscall.SIGKILL) // On SIGTERM, the API server would wait a minute for its watchers.
		if t.Failed() {
			t.Logf("%s's log ends:\n%s", name, tail(started.log))
		}
	})
	return started
}

// kubernetes is a component that is linked into this binary.
func (c *cluster) kubernetes(t *testing.T, name string, arguments ...string) *component {
	t.Helper()
	return c.component(t, name, func() *exec.Cmd {
		command := exec.Command("/proc/self/exe", arguments...)
		command.Env = append(os.Environ(), role+"="+name)
		return command
	})
}

func (p *component) start(t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	if info, err := log.Stat(); err == nil {
		p.from = info.Size()
	}
	p.running, p.ended, p.stopped = p.command(), make(chan struct{}), false
	p.running.Stdout, p.running.Stderr = log, log
	if err := p.running.Start(); err != nil {
		t.Fatalf("start %s: %v", p.name, err)
	}
	go func(running *exec.Cmd, ended chan struct{}) {
		_ = running.Wait()
		close(ended)
	}(p.running, p.ended)
}

// stop sends the signal and waits for the end, at last by force.
func (p *component) stop(signal syscall.Signal) {
	p.stopped = true
	_ = p.running.Process.Signal(signal)
	force := time.AfterFunc(await.Patience, func() { _ = p.running.Process.Kill() })
	defer force.Stop()
	<-p.ended
}

// died is true once the process has ended although no test stopped it.
func (p *component) died() bool {
	select {
	case <-p.ended:
		return !p.stopped
	default:
		return false
	}
}

// keepKubelet returns an error when the kubelet has died. If the test sets kubeletBug, and the kubelet died
// of one bug (Kubernetes 1.36), keepKubelet starts it again instead, as systemd does. The bug occurs when
// the container of a pod that has a resource by a claim starts while the device plugin registers the same
// name: the kubelet then calls ManagerImpl.Allocate (pkg/kubelet/cm/devicemanager/manager.go) during an
// admission, and both change the map devicesToReuse without a lock.
func (c *cluster) keepKubelet(t *testing.T) error {
	t.Helper()
	if c.kubelet == nil || !c.kubelet.died() {
		return nil
	}
	log, err := os.ReadFile(c.kubelet.log)
	if err != nil {
		return err
	}
	said := string(log[c.kubelet.from:])
	if !c.kubeletBug || !strings.Contains(said, "panic: assignment to entry in nil map") || !strings.Contains(said, "removeContainerAllocatedResources") {
		return await.Never("the kubelet has died: %s", tail(c.kubelet.log))
	}
	c.report.note("kubelet died of its bug and was started again", t.Name())
	c.kubelet.start(t)
	c.kubeletDeaths++
	return nil
}

func tail(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(content[max(0, len(content)-4000):])
}

// The tokens of the cluster's users.
const (
	adminToken    = "admin-token"
	managerToken  = "manager-token"
	schedulerName = "system:kube-scheduler"
	nodeToken     = "node-token"
	strangerToken = "stranger-token"
)

// startControlPlane starts etcd, the API server, the controllers and the scheduler.
func (c *cluster) startControlPlane(t *testing.T) {
	t.Helper()
	etcd := c.startEtcd(t)
	c.write(t, "tokens.csv", fmt.Sprintf(`%s,admin,1,"system:masters"
%s,system:kube-controller-manager,2,"system:masters"
%s,%s,3
%s,system:node:%s,4,"system:nodes"
%s,stranger,5
`, adminToken, managerToken, schedulerName, schedulerName, nodeToken, hostName, strangerToken))
	c.writeAccountsKey(t)
	c.apiServer = c.kubernetes(t, "kube-apiserver",
		"--etcd-servers="+etcd, "--cert-dir="+c.path("certificates"), "--bind-address=0.0.0.0", "--secure-port=443",
		"--advertise-address="+nodeAddress, "--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.96.0.0/24",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--token-auth-file="+c.path("tokens.csv"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+c.path("accounts.key"),
		"--service-account-signing-key-file="+c.path("accounts.key"), "--shutdown-delay-duration=0s", "--allow-privileged=true",
	)
	c.kubeconfigs(t)
	c.await(t, "the API server", c.ready)
	c.kubernetes(t, "kube-controller-manager",
		"--kubeconfig="+c.path("manager.conf"), "--leader-elect=false", "--use-service-account-credentials=false",
		"--service-account-private-key-file="+c.path("accounts.key"), "--root-ca-file="+c.path("certificates/apiserver.crt"),
		"--controllers=*,-nodeipam,-cloud-node-lifecycle-controller", "--secure-port=0", "--cert-dir="+c.path("manager"),
		"--kube-api-qps=200", "--kube-api-burst=400", "--concurrent-daemonset-syncs=2",
	)
	c.kubernetes(t, "kube-scheduler",
		"--kubeconfig="+c.path("scheduler.conf"), "--leader-elect=false", "--secure-port=0", "--cert-dir="+c.path("scheduler"),
		"--kube-api-qps=200", "--kube-api-burst=400",
	)
}

func (c *cluster) startEtcd(t *testing.T) (address string) {
	t.Helper()
	config := embed.NewConfig()
	config.Dir, config.LogLevel, config.LogOutputs = c.path("etcd"), "error", []string{c.path("etcd.log")}
	config.UnsafeNoFsync = true
	client, peer := url.URL{Scheme: "http", Host: "127.0.0.1:2379"}, url.URL{Scheme: "http", Host: "127.0.0.1:2380"}
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(etcd.Close)
	select {
	case <-etcd.Server.ReadyNotify():
	case err := <-etcd.Err():
		t.Fatalf("etcd does not start: %v", err)
	}
	return client.String()
}

// kubeconfigs writes a file for each user.
func (c *cluster) kubeconfigs(t *testing.T) {
	t.Helper()
	for name, token := range map[string]string{"admin": adminToken, "manager": managerToken, "scheduler": schedulerName, "node": nodeToken} {
		c.write(t, name+".conf", fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: e2e
  cluster: {server: "https://%s:443", certificate-authority: %s}
users:
- name: %s
  user: {token: %s}
contexts:
- name: e2e
  context: {cluster: e2e, user: %[3]s}
current-context: e2e
`, nodeAddress, c.path("certificates/apiserver.crt"), name, token))
	}
}

// writeAccountsKey makes the key that signs service accounts' tokens.
func (c *cluster) writeAccountsKey(t *testing.T) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	c.write(t, "accounts.key", string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})))
}

func (c *cluster) path(name string) string { return filepath.Join(c.work, name) }

func (c *cluster) write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(c.path(name)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.path(name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
