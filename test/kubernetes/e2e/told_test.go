package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// awaitEvent waits until an event about the node has this reason and all of these
// words, and happened after began; it returns what the event says.
func (c *cluster) awaitEvent(t *testing.T, began time.Time, reason string, words ...string) (message string) {
	t.Helper()
	c.await(t, time.Minute, fmt.Sprintf("the event %s with %q", reason, words), func() error {
		events, err := c.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + hostName + ",reason=" + reason,
		})
		if err != nil {
			return err
		}
		var said []string
		for _, event := range events.Items {
			said = append(said, event.LastTimestamp.Format(time.TimeOnly)+" "+event.Message)
			// An event has whole seconds.
			if !event.LastTimestamp.Time.Before(began.Truncate(time.Second)) && hasAll(event.Message, words) {
				message = event.Message
				return nil
			}
		}
		return fmt.Errorf("there are %q", said)
	})
	return message
}

// awaitCondition waits until the node's condition GPUSharingReady says so.
func (c *cluster) awaitCondition(t *testing.T, status v1.ConditionStatus, reason string, words ...string) {
	t.Helper()
	c.await(t, time.Minute, fmt.Sprintf("GPUSharingReady to be %s, %s", status, reason), func() error {
		for _, condition := range c.node(t).Status.Conditions {
			if condition.Type != "GPUSharingReady" {
				continue
			}
			if condition.Status == status && condition.Reason == reason && hasAll(condition.Message, words) {
				return nil
			}
			return fmt.Errorf("it is %s, %s: %s", condition.Status, condition.Reason, condition.Message)
		}
		return errNotYet
	})
}

// awaitProfile waits until the node's metadata name the profile in force and the
// state of the one that is wanted.
func (c *cluster) awaitProfile(t *testing.T, name, state string) {
	t.Helper()
	c.await(t, time.Minute, fmt.Sprintf("the node to say %s and %s", name, state), func() error {
		node := c.node(t)
		if got, gotState := node.Annotations["virgate.github.io/profile"], node.Labels[profileLabel+".state"]; got != name || gotState != state {
			return fmt.Errorf("it says %q and %q", got, gotState)
		}
		return nil
	})
}

func hasAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}
