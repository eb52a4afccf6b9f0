package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	authentication "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// attempt is something that is tried with a token, without any effect; refused is
// part of the API server's refusal, empty for what is allowed.
type attempt struct {
	name    string
	try     func(context.Context, *kubernetes.Clientset) error
	refused string
}

// allowed waits until the attempt ends as it should: a policy is not in force at
// once, and an allowed one may meet another writer.
func (c *cluster) allowed(t *testing.T, client *kubernetes.Clientset, a attempt) {
	t.Helper()
	c.await(t, 10*time.Second, "the API server's word", func() error {
		err := a.try(t.Context(), client)
		switch {
		case a.refused == "":
			return err
		case err == nil:
			return errors.New("it is allowed")
		case !strings.Contains(err.Error(), a.refused):
			return fmt.Errorf("refused for another reason: %w", err)
		}
		return nil
	})
}

func readPods(ctx context.Context, client *kubernetes.Clientset) error {
	_, err := client.CoreV1().Pods(workspace).List(ctx, metav1.ListOptions{})
	return err
}

func readConfigMap(name string) func(context.Context, *kubernetes.Clientset) error {
	return func(ctx context.Context, client *kubernetes.Clientset) error {
		_, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	}
}

func patchNode(name, patch string, subresources ...string) func(context.Context, *kubernetes.Clientset) error {
	return func(ctx context.Context, client *kubernetes.Clientset) error {
		options := metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}
		_, err := client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, []byte(patch), options, subresources...)
		return err
	}
}

// tell makes an event about the node.
func tell(node string) func(context.Context, *kubernetes.Clientset) error {
	return func(ctx context.Context, client *kubernetes.Clientset) error {
		event := &v1.Event{
			ObjectMeta:     metav1.ObjectMeta{GenerateName: "attempt-", Namespace: metav1.NamespaceDefault},
			InvolvedObject: v1.ObjectReference{Kind: "Node", Name: node},
			Reason:         "Attempt",
		}
		_, err := client.CoreV1().Events(event.Namespace).Create(ctx, event, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
}

// token is one of Virgate's service account, bound to the pod as the kubelet has
// it, or to none.
func (c *cluster) token(t *testing.T, pod *v1.Pod) string {
	t.Helper()
	request := &authentication.TokenRequest{}
	if pod != nil {
		request.Spec.BoundObjectRef = &authentication.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	}
	answer, err := c.client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), "virgate", request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Status.Token
}

// as is a client with that token alone.
func (c *cluster) as(t *testing.T, token string) *kubernetes.Clientset {
	t.Helper()
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}
