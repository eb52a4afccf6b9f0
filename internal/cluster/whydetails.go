package cluster

import (
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// details returns what Virgate reports about the node's GPUs that pods cannot get, or that only
// their present holders can use. If page is nil, only the Node's condition is known.
func (n Node) details(page *status.Status) (texts []string) {
	if c := n.Condition; c.Type != "" && (c.Status != corev1.ConditionTrue || n.switching()) {
		texts = append(texts, strings.TrimSuffix(c.Reason+": "+c.Message, ": "))
	}
	if page == nil {
		return texts
	}
	for _, warning := range page.Warnings {
		if strings.Contains(warning, nodereport.ReleasedUntil) {
			texts = append(texts, warning)
		}
	}
	faulty := func(what, index string, h status.Health) {
		if h.State != sharing.Healthy && h.State != "" {
			texts = append(texts, strings.TrimSuffix(fmt.Sprintf("%s %s is %s: %s", what, index, h.State, h.Reason),
				": "))
		}
	}
	for _, gpu := range page.GPUs {
		faulty("GPU", strconv.Itoa(gpu.Index), gpu.Health)
		for _, unit := range gpu.Units {
			if unit.ID != gpu.UUID && unit.Health.State != gpu.Health.State {
				faulty("partition", unit.Index, unit.Health)
			}
		}
	}
	if page.DRA != nil {
		texts = append(texts, page.DRA.Reserved()...)
	}
	return texts
}
