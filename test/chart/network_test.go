package chart

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// TestNetworkPolicy checks that the policy exists if it is enabled, or by default if clients are listed,
// and that it admits only these, and to one port.
func TestNetworkPolicy(t *testing.T) {
	namespaces := networkingv1.NetworkPolicyPeer{NamespaceSelector: &metav1.LabelSelector{
		MatchExpressions: []metav1.LabelSelectorRequirement{{
			Key:      "kubernetes.io/metadata.name",
			Operator: metav1.LabelSelectorOpIn,
			Values:   []string{"monitoring", "dashboards"},
		}},
	}}
	block := networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8"}}
	const named, from = "namespaces: [monitoring, dashboards]", "from: [{ipBlock: {cidr: 10.0.0.0/8}}]"
	for _, test := range []struct {
		values string
		policy bool
		peers  []networkingv1.NetworkPolicyPeer
	}{
		{"{}", false, nil},
		{"{enabled: true}", true, nil},
		{"{" + named + "}", true, []networkingv1.NetworkPolicyPeer{namespaces}},
		{"{" + from + "}", true, []networkingv1.NetworkPolicyPeer{block}},
		{"{" + named + ", " + from + "}", true, []networkingv1.NetworkPolicyPeer{namespaces, block}},
		{"{enabled: true, " + named + "}", true, []networkingv1.NetworkPolicyPeer{namespaces}},
		{"{enabled: false, " + named + ", " + from + "}", false, nil},
	} {
		t.Run(test.values, func(t *testing.T) {
			var found []*networkingv1.NetworkPolicy
			for _, object := range decode(t, manifestOf(t, "networkPolicy: "+test.values)) {
				if policy, ok := object.(*networkingv1.NetworkPolicy); ok {
					found = append(found, policy)
				}
			}
			if (len(found) == 1) != test.policy || len(found) > 1 {
				t.Fatalf("%d policies", len(found))
			}
			if !test.policy {
				return
			}
			port := intstr.FromString("http")
			want := []networkingv1.NetworkPolicyIngressRule{{
				From: test.peers,
				Ports: []networkingv1.NetworkPolicyPort{{
					Port:     &port,
					Protocol: new(corev1.ProtocolTCP),
				}},
			}}
			if diff := cmp.Diff(want, found[0].Spec.Ingress); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
