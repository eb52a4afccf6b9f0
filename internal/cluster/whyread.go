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
	err = Pages(ctx, &c.Lists, c.api, "", "nodes", metav1.ListOptions{}, func(nodes *corev1.NodeList) {
		for i := range nodes.Items {
			q.Nodes = append(q.Nodes, NewCandidate(pod, &nodes.Items[i], o.Domain))
		}
	})
	if err != nil {
		return Answer{}, fmt.Errorf("list nodes: %w", err)
	}
	err = Pages(ctx, &c.Lists, c.api, "", "pods", o.podSelectors(), func(pods *corev1.PodList) {
		for i := range pods.Items {
			q.add(&pods.Items[i])
		}
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
func (c *Client) pod(ctx context.Context, namespace, name string) (found *corev1.Pod, err error) {
	named := metav1.ListOptions{FieldSelector: "metadata.name=" + name}
	err = Pages(ctx, &c.Lists, c.api, namespace, "pods", named, func(list *corev1.PodList) {
		for i, p := range list.Items {
			if p.Namespace == namespace && p.Name == name {
				found = &list.Items[i]
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("find pod %s/%s: %w", namespace, name, err)
	}
	return found, nil
}

// notMade returns the latest event that a pod of that name, or a pod of a workload of that name,
// could not be created; "" if there is none.
func (c *Client) notMade(ctx context.Context, namespace, name string) string {
	var last *corev1.Event
	failed := metav1.ListOptions{FieldSelector: "reason=FailedCreate"}
	err := Pages(ctx, &c.Lists, c.api, namespace, "events", failed, func(list *corev1.EventList) {
		for _, event := range list.Items {
			// A Deployment's ReplicaSet is named after it, with a hash.
			owner := event.InvolvedObject.Name == name || strings.HasPrefix(event.InvolvedObject.Name, name+"-")
			ofIt := owner || strings.HasPrefix(name, event.InvolvedObject.Name+"-")
			if event.Reason == "FailedCreate" && ofIt &&
				(last == nil || last.LastTimestamp.Before(&event.LastTimestamp)) {
				last = &event
			}
		}
	})
	if err != nil {
		return fmt.Sprintf("; what its owner says of it is not known: list events: %v", err)
	}
	if last == nil {
		return ""
	}
	return fmt.Sprintf("; the %s %s could not make a pod: %s", last.InvolvedObject.Kind, last.InvolvedObject.Name,
		last.Message)
}

// refusing returns which quotas of the namespace have none left of the domain's resources.
func (c *Client) refusing(ctx context.Context, namespace, domain string) string {
	var texts []string
	all := metav1.ListOptions{}
	err := Pages(ctx, &c.Lists, c.api, namespace, "resourcequotas", all, func(list *corev1.ResourceQuotaList) {
		for _, quota := range list.Items {
			texts = append(texts, exhausted(quota, domain)...)
		}
	})
	if err != nil {
		return fmt.Sprintf("; whether a quota keeps it from being made is not known: list resourcequotas: %v", err)
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

// kinds are what may precede a name and a slash, as for kubectl. Of what makes pods, the name is enough.
var kinds = []string{
	"pod", "pods", "po", "deployment", "deployments", "deploy", "deployment.apps", "statefulset", "statefulsets", "sts",
	"statefulset.apps", "replicaset", "replicasets", "rs", "replicaset.apps", "job", "jobs", "job.batch",
}

// ParsePod parses NAMESPACE/POD, or POD, also as KIND/POD, in the given namespace. A namespace that is called like a
// kind has to be given apart.
func ParsePod(text, namespace string) (_, name string, err error) {
	before, after, both := strings.Cut(text, "/")
	switch {
	case both && slices.Contains(kinds, before):
		return ParsePod(after, namespace)
	case both:
		namespace, text = before, after
	}
	if namespace == "" || text == "" || strings.ContainsAny(namespace+text, "/,= \t") {
		return "", "", errors.New("expected POD or NAMESPACE/POD")
	}
	return namespace, text, nil
}
