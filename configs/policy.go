package configs

import (
	"fmt"

	"github.com/virgate/virgate/sharing"
)

// readPolicy reads policy and spread; without them the profile's policy holds.
// written says that the entry has at least one of them.
func (r *shareReader) readPolicy(f fields) (policy sharing.Policy, strict, written bool) {
	policy = r.profile.Policy
	if v := f.field("policy"); !v.absent() {
		written = true
		v.note("Virgate's own; NVIDIA's plugin has one policy for the node")
		text, ok := v.text()
		switch p := sharing.Policy(text); p {
		case sharing.Distributed, sharing.Packed, sharing.Spread:
			policy = p
		default:
			if ok {
				v.problem("expected distributed, packed or spread")
			}
		}
	}
	v := f.field("spread")
	if v.absent() {
		return policy, false, written
	}
	v.note("Virgate's own: a container never gets two devices of one unit; NVIDIA's plugin has no such key")
	if text, ok := v.text(); ok && text != "strict" {
		v.problem("expected strict")
	} else if ok && policy != sharing.Spread {
		v.source.problem(v.place(), v.shown(), fmt.Sprintf("needs policy: spread, the policy here is %s", policy))
	}
	return policy, true, true
}

// settlePolicies gives all entries that are offered under one name the policy
// that one of them writes, because devices are chosen from the whole resource.
// Two that disagree are reported.
func settlePolicies(entries []sharedEntry) {
	decided := make(map[string]sharedEntry)
	for _, e := range entries {
		if !e.policyWritten {
			continue
		}
		first, ok := decided[e.offeredAs()]
		if !ok {
			decided[e.offeredAs()] = e
			continue
		}
		if first.share.Policy != e.share.Policy || first.share.SpreadStrict != e.share.SpreadStrict {
			e.value.source.problem(e.value.place(), "", fmt.Sprintf(
				"is offered as %s with policy %s, but the entry on line %d offers that with policy %s: a resource has one policy",
				e.offeredAs(), policyText(e.share), first.value.line, policyText(first.share)))
		}
	}
	for i := range entries {
		if e, ok := decided[entries[i].offeredAs()]; ok {
			entries[i].share.Policy = e.share.Policy
			entries[i].share.SpreadStrict = e.share.SpreadStrict
		}
	}
}

func policyText(s sharing.Share) string {
	if s.SpreadStrict {
		return string(s.Policy) + " (strict)"
	}
	return string(s.Policy)
}
