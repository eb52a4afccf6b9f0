package report

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/sharing"
)

// ConditionType is the Node's condition that says whether pods can be given
// what the profile in force offers.
const ConditionType = "GPUSharingReady"

// longestMessage bounds messages, in bytes: Kubernetes' newer Event API refuses
// longer ones (kubernetes, pkg/apis/core/validation/events.go).
const longestMessage = 1024

// condition writes the Node's condition.
type condition struct {
	reports reports
	client  client
	// written is the condition as the Node has it; nil while that is not known.
	written *corev1.NodeCondition
}

func (c *condition) forget() { c.written = nil }

func (c *condition) write(ctx context.Context) (again time.Duration, err error) {
	report, ok := c.reports.report()
	if !ok {
		return 0, nil
	}
	if c.written == nil {
		// An earlier run may have written it: its time must not begin anew.
		if c.written, err = c.read(ctx); err != nil {
			return 0, err
		}
	}
	next := follow(*c.written, conditionOf(report), time.Now())
	if same(next, *c.written) {
		return 0, nil
	}
	if err := c.patch(ctx, next); err != nil {
		return 0, err
	}
	c.written = &next
	return 0, nil
}

// read reads the condition; a Node without it yields the zero value.
func (c *condition) read(ctx context.Context) (*corev1.NodeCondition, error) {
	n, err := c.client.read(ctx)
	if err != nil {
		return nil, err
	}
	found := corev1.NodeCondition{}
	if i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == ConditionType }); i >= 0 {
		found = n.Status.Conditions[i]
	}
	return &found, nil
}

// patch writes the one condition: strategic merging takes conditions by type
// (k8s.io/api/core/v1, NodeStatus).
func (c *condition) patch(ctx context.Context, next corev1.NodeCondition) error {
	type status struct {
		Conditions []corev1.NodeCondition `json:"conditions"`
	}
	patch := struct {
		Status status `json:"status"`
	}{status{[]corev1.NodeCondition{next}}}
	return c.client.patchNode(ctx, types.StrategicMergePatchType, patch, "status")
}

// conditionOf is what the report says as a condition, without its times.
func conditionOf(report sharing.NodeReport) corev1.NodeCondition {
	return corev1.NodeCondition{
		Type: ConditionType, Status: corev1.ConditionStatus(report.Ready),
		Reason: report.Reason, Message: cut(report.Message),
	}
}

// follow is next with the times that it has after last: a condition that goes
// on has the time at which it began.
func follow(last, next corev1.NodeCondition, now time.Time) corev1.NodeCondition {
	next.LastHeartbeatTime = metav1.NewTime(now)
	next.LastTransitionTime = last.LastTransitionTime
	if last.Status != next.Status || last.LastTransitionTime.IsZero() {
		next.LastTransitionTime = next.LastHeartbeatTime
	}
	return next
}

// same says that the two differ in times alone.
func same(a, b corev1.NodeCondition) bool {
	return a.Status == b.Status && a.Reason == b.Reason && a.Message == b.Message
}
