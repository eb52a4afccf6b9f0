package agent

import "github.com/virgate/virgate/sharing"

// withholdMPS withholds what is shared by MPS until its daemon answers.
func withholdMPS(plan sharing.Plan) sharing.Plan {
	reasons := map[string]string{}
	for _, r := range plan.Resources {
		for _, u := range r.Units {
			if u.MPS.Shares > 0 {
				reasons[u.ID] = "MPS daemon: there is none yet in this version"
			}
		}
	}
	return plan.WithholdModes(reasons)
}
