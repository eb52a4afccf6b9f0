package e2e

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

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
		"--service-account-signing-key-file="+c.path("accounts.key"), "--shutdown-delay-duration=0s",
	)
	c.kubeconfigs(t)
	c.await(t, time.Minute, "the API server", c.ready)
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
	case <-time.After(time.Minute):
		t.Fatal("etcd does not start")
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
