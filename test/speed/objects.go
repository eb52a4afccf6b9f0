package main

import "slices"

// counts are numbers of objects, counted several times.
type counts []float64

// median is as sample.median: other things that the program does meanwhile make
// a few of the numbers larger.
func (c counts) median() float64 {
	if len(c) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(c))[(len(c)-1)/2]
}

// counted adds how many objects the process has made when the work is done, with
// those that it makes to say so.
func (c *counts) counted(p *process, work func() error) error {
	const made = "go_memstats_mallocs_total"
	before, err := p.series(made)
	if err != nil {
		return err
	}
	if err := work(); err != nil {
		return err
	}
	after, err := p.series(made)
	if err != nil {
		return err
	}
	*c = append(*c, after-before)
	return nil
}
