package main

import (
	"context"
	"time"
)

// asleep is when the start is over, which the program takes to last 10 s.
const asleep = 12 * time.Second

// footprint is what the program keeps when its start is over, for which it waits.
func footprint(ctx context.Context, p *process) ([]figure, error) {
	if err := pause(ctx, time.Until(p.began.Add(asleep))); err != nil {
		return nil, err
	}
	goroutines, err := p.series("go_goroutines")
	if err != nil {
		return nil, err
	}
	resident, err := p.memory()
	if err != nil {
		return nil, err
	}
	return []figure{
		{"goroutines", goroutines, ""},
		{"own", megabytes(resident.own), "MB"},
		{"resident", megabytes(resident.all), "MB"},
	}, nil
}
