package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// namespace is where Virgate is installed.
const namespace = "virgate"

// chart is its folder.
const chart = "../../../charts/virgate"

// install installs the chart, or changes what is installed, by Helm's command and
// waits until it says that all is ready. Each setting is a --set.
func (c *cluster) install(t *testing.T, settings ...string) {
	t.Helper()
	arguments := []string{"upgrade", "--install", "virgate", chart,
		"--namespace", namespace, "--create-namespace", "--wait", "--timeout", "2m"}
	for _, setting := range settings {
		arguments = append(arguments, "--set", setting)
	}
	c.helm(t, arguments...)
}

// uninstall removes the chart, if it is installed, and waits until its pods are gone.
func (c *cluster) uninstall(t *testing.T) {
	t.Helper()
	c.helm(t, "uninstall", "virgate", "--namespace", namespace, "--ignore-not-found", "--wait", "--cascade", "foreground")
}

func (c *cluster) helm(t *testing.T, arguments ...string) string {
	t.Helper()
	command := exec.Command(filepath.Join(c.tools, "helm"), arguments...)
	command.Env = append(os.Environ(), "KUBECONFIG="+c.path("admin.conf"), "HOME="+c.work)
	output, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("helm %q: %v\n%s", arguments, err, output)
	}
	return string(output)
}
