package e2e

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// role says what a process of this binary is; without it, the test that a user started.
const role = "VIRGATE_E2E_ROLE"

// The roles besides Kubernetes' components.
const (
	// asFirst is process 1 of the namespaces.
	asFirst = "first"
	// asTest runs the tests in them.
	asTest = "test"
)

func TestMain(m *testing.M) {
	components := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllers.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	}
	switch name := os.Getenv(role); name {
	case "":
		os.Exit(outside(m))
	case asFirst:
		os.Exit(first())
	case asTest:
		os.Exit(m.Run())
	default:
		component, ok := components[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "%s: no role %q\n", role, name)
			os.Exit(2)
		}
		os.Exit(cli.Run(component()))
	}
}
