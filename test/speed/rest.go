package main

import (
	"context"
	"fmt"
	"time"
)

// atRest is when what the program has let go of after its start, and needs all the
// same, is mapped again.
const atRest = 30 * time.Second

// rest measures a program that has all it can have (the API server followed and
// written to, metrics scraped, the page shown) and then has nothing to do.
func rest(ctx context.Context, b bench) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.unpack(); err != nil {
		return nil, err
	}
	const devices = 80
	api, err := newAPIServer(map[string]string{"shared": string(profile(devices))})
	if err != nil {
		return nil, err
	}
	defer api.Close()
	defer api.CloseClientConnections()
	if err := api.kubeconfig(s.path("kubeconfig")); err != nil {
		return nil, err
	}
	p, err := s.run(ctx, "--kubeconfig", s.path("kubeconfig"), "--node-name", nodeName, "--config-map", namespace+"/"+configMapName)
	if err != nil {
		return nil, err
	}
	if err := s.shows(ctx, devices); err != nil {
		return nil, err
	}
	for _, path := range []string{"/metrics", "/status", "/metrics", "/status"} {
		if _, err := p.get(path); err != nil {
			return nil, err
		}
	}
	if err := pause(ctx, atRest); err != nil {
		return nil, err
	}
	before, err := p.work()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := pause(ctx, time.Duration(b.rounds(20))*time.Second); err != nil {
		return nil, err
	}
	after, err := p.work()
	if err != nil {
		return nil, err
	}
	seconds := time.Since(began).Seconds()
	kept, err := footprint(ctx, p)
	if err != nil {
		return nil, err
	}
	if err := p.stop(); err != nil {
		return nil, fmt.Errorf("rest: %w", err)
	}
	return prefixed("rest", append([]figure{
		{"cpu", milliseconds(after.cpu-before.cpu) / seconds, "ms/s"},
		{"wakes", float64(after.wakes-before.wakes) / seconds, "/s"},
	}, kept...)), nil
}
