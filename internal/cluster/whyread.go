package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Why reads what is needed to explain why a pod waits, and explains it. If the pod does not exist,
// the error names the failed creation and the exhausted quotas that may have prevented it.
func (c *Client) Why(ctx context.Context, o Options, namespace, name string) (Answer, error) {
	pod, err := c.pod(ctx, namespace, name)
	if err != nil {
		return Answer{}, err
	}
	if pod == nil {
		return Answer{}, fmt.Errorf("there is no pod %s/%s%s%s", namespace, name, c.notMade(ctx, namespace, name),
			c.refusing(ctx, namespace, o.Domain))
	}
	q := Question{
		Pod:       pod,
		Domain:    o.Domain,
		Namespace: o.Namespace,
		Used:      map[string]corev1.ResourceList{},
	}
	if a := Why(q); a.State != "waiting" || len(pod.Spec.SchedulingGates) > 0 {
		return a, nil
	}
	var nodes corev1.NodeList
	err = c.list(ctx, "", "nodes", metav1.ListOptions{}, &nodes, func() {
		for i := range nodes.Items {
			q.Nodes = append(q.Nodes, NewCandidate(pod, &nodes.Items[i], o.Domain))
		}
		nodes.Items = nil
	})
	if err != nil {
		return Answer{}, fmt.Errorf("list nodes: %w", err)
	}
	var pods corev1.PodList
	err = c.list(ctx, "", "pods", o.podSelectors(), &pods, func() {
		for i := range pods.Items {
			q.add(&pods.Items[i])
		}
		pods.Items = nil
	})
	if err != nil {
		if ctx.Err() != nil {
			return Answer{}, ctx.Err()
		}
		q.PodsUnread = fmt.Sprintf("list pods: %v", err)
		return Why(q), nil
	}
	if short := q.short(); len(short) > 0 && o.StatusTimeout > 0 {
		q.Statuses, q.StatusUnread = c.statuses(ctx, o, Snapshot{Nodes: short, Pods: q.Pods})
	}
	return Why(q), ctx.Err()
}

// mostPages limits the status pages read to explain one pod, to what a user would read.
const mostPages = 20

// short returns Virgate's nodes that have too few of what the pod wants, those with the fewest
// other barriers first.
func (q *Question) short() (nodes []Node) {
	byNode := q.holders()
	candidates := slices.Clone(q.Nodes)
	slices.SortStableFunc(candidates, func(x, y Candidate) int { return cmp.Compare(len(x.Barriers), len(y.Barriers)) })
	for _, node := range candidates {
		if node.Condition.Type != "" && len(nodes) < mostPages &&
			q.judge(ofDomain(wanted(q.Pod), q.Domain), node, byNode[node.Name]).short {
			nodes = append(nodes, node.Node)
		}
	}
	return nodes
}

// add counts what a pod has of its node.
func (q *Question) add(p *corev1.Pod) {
	if p.Spec.NodeName == "" {
		return
	}
	if kept, ok := trimPod(p, q.Domain, q.Namespace); ok {
		q.Pods = append(q.Pods, kept)
	}
	has := wanted(p)
	for name := range wanted(q.Pod) {
		if strings.HasPrefix(string(name), q.Domain+"/") {
			continue
		}
		if q.Used[p.Spec.NodeName] == nil {
			q.Used[p.Spec.NodeName] = corev1.ResourceList{}
		}
		used := q.Used[p.Spec.NodeName][name]
		used.Add(has[name])
		q.Used[p.Spec.NodeName][name] = used
	}
}

// pod returns nil if there is no such pod. It uses a list, like all requests here, so that the
// right to list is enough.
func (c *Client) pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	var list corev1.PodList
	if err := c.inNamespace(ctx, namespace, "pods", "metadata.name="+name, &list); err != nil {
		return nil, fmt.Errorf("find pod %s/%s: %w", namespace, name, err)
	}
	if i := slices.IndexFunc(list.Items,
		func(p corev1.Pod) bool { return p.Namespace == namespace && p.Name == name }); i >= 0 {
		return &list.Items[i], nil
	}
	return nil, nil
}

// inNamespace lists a few objects of one namespace, with rights in that namespace only.
func (c *Client) inNamespace(ctx context.Context, namespace, resource, fields string, into runtime.Object) error {
	c.Lists.Add(1)
	return c.core.Get().Namespace(namespace).Resource(resource).VersionedParams(
		&metav1.ListOptions{FieldSelector: fields}, metav1.ParameterCodec).
		Timeout(listTimeout).Do(ctx).Into(into)
}

// notMade returns the latest event that a pod of that name, or a pod of a workload of that name,
// could not be created; "" if there is none.
func (c *Client) notMade(ctx context.Context, namespace, name string) string {
	var list corev1.EventList
	if err := c.inNamespace(ctx, namespace, "events", "reason=FailedCreate", &list); err != nil {
		return fmt.Sprintf("; what its owner says of it is not known: list events: %v", err)
	}
	var last *corev1.Event
	for i := range list.Items {
		event := &list.Items[i]
		// A Deployment's ReplicaSet is named after it, with a hash.
		owner := event.InvolvedObject.Name == name || strings.HasPrefix(event.InvolvedObject.Name, name+"-")
		ofIt := owner || strings.HasPrefix(name, event.InvolvedObject.Name+"-")
		if event.Reason == "FailedCreate" && ofIt && (last == nil || last.LastTimestamp.Before(&event.LastTimestamp)) {
			last = event
		}
	}
	if last == nil {
		return ""
	}
	return fmt.Sprintf("; the %s %s could not make a pod: %s", last.InvolvedObject.Kind, last.InvolvedObject.Name,
		last.Message)
}

// refusing returns which quotas of the namespace have none left of the domain's resources.
func (c *Client) refusing(ctx context.Context, namespace, domain string) string {
	var list corev1.ResourceQuotaList
	if err := c.inNamespace(ctx, namespace, "resourcequotas", "", &list); err != nil {
		return fmt.Sprintf("; whether a quota keeps it from being made is not known: list resourcequotas: %v", err)
	}
	var texts []string
	for _, quota := range list.Items {
		texts = append(texts, exhausted(quota, domain)...)
	}
	if len(texts) == 0 {
		return ""
	}
	return "; if something should have made it, the likely reason that it did not: " + strings.Join(texts, "; ")
}

// exhausted returns what a quota has none left of. How much the missing pod wanted is unknown, so a
// quota that is only nearly used up is left to notMade.
func exhausted(quota corev1.ResourceQuota, domain string) (texts []string) {
	const prefix = corev1.DefaultResourceRequestsPrefix
	for name, hard := range quota.Status.Hard {
		resource, ok := strings.CutPrefix(string(name), prefix)
		if used := quota.Status.Used[name]; ok && strings.HasPrefix(resource, domain+"/") && used.Cmp(hard) >= 0 {
			texts = append(texts, fmt.Sprintf("the quota %s has %s of %s %s used", quota.Name, used.String(),
				hard.String(), resource))
		}
	}
	slices.Sort(texts)
	return texts
}

// ParsePod parses NAMESPACE/POD, or POD in the given namespace.
func ParsePod(text, namespace string) (_, name string, err error) {
	text = strings.TrimPrefix(strings.TrimPrefix(text, "pods/"), "pod/")
	if before, after, both := strings.Cut(text, "/"); both {
		namespace, text = before, after
	}
	if namespace == "" || text == "" || strings.ContainsAny(namespace+text, "/,= \t") {
		return "", "", errors.New("expected POD or NAMESPACE/POD")
	}
	return namespace, text, nil
}
