package main

import "github.com/virgate/virgate/mig"

// migBoardReport is the plan of a board in JSON.
type migBoardReport struct {
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// Wanted says that the layout asks something of the board that it can have.
	Wanted bool `json:"wanted"`
	// Complete says that the board has its layout after the steps.
	Complete bool       `json:"complete"`
	Problem  string     `json:"problem,omitempty"`
	Change   mig.Change `json:"change"`
}

type migNodeReport struct {
	GPUs     []migBoardReport `json:"gpus"`
	Warnings []string         `json:"warnings"`
}

func migReport(plans []boardPlan, warnings []string) migNodeReport {
	report := migNodeReport{GPUs: []migBoardReport{}, Warnings: append([]string{}, warnings...)}
	for _, p := range plans {
		entry := migBoardReport{
			GPU: p.gpu.UUID, Index: p.gpu.Index, Wanted: p.wanted,
			Complete: p.problem == nil && p.change.Complete(), Change: p.change,
		}
		if p.problem != nil {
			entry.Problem = p.problem.Error()
		}
		report.GPUs = append(report.GPUs, entry)
	}
	return report
}
