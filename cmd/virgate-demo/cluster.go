package main

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/status"
)

// serveCluster serves the page of kubectl virgate --serve, for a cluster with this node alone, until ctx
// ends. The node's own page is at the address listen.
func (s *demoNode) serveCluster(ctx context.Context, listen string) error {
	page := cluster.NewPage(func() (*cluster.Snapshot, <-chan struct{}) { return s.clusterNow(ctx, listen), nil })
	return page.Serve(ctx, "127.0.0.1:0", func(url string) { s.say("The page of a whole cluster is at %s", url) })
}

// clusterNow returns what a Watcher would have read.
func (s *demoNode) clusterNow(ctx context.Context, listen string) *cluster.Snapshot {
	now, read := s.kubelet.Snapshot(), cluster.Status{}
	page, err := statusAt(ctx, listen)
	node := cluster.Node{
		Name:        demoNodeName,
		GPUs:        len(s.gpus),
		Capacity:    map[string]int64{},
		Allocatable: map[string]int64{},
	}
	if err == nil {
		read.Page, node.State = page, string(page.Profile.State)
	} else {
		read.Unread = err.Error()
	}
	for name, r := range now.Resources {
		node.Capacity[name], node.Allocatable[name] = int64(r.Capacity), int64(r.Allocatable)
	}
	snapshot := &cluster.Snapshot{
		At:       time.Now(),
		Nodes:    []cluster.Node{node},
		Statuses: map[string]cluster.Status{demoNodeName: read},
	}
	for _, pod := range now.Pods {
		requests := map[string]int64{}
		for _, container := range pod.Containers {
			for _, grant := range container.Grants {
				requests[grant.Resource] += int64(len(grant.Devices))
			}
		}
		snapshot.Pods = append(snapshot.Pods, cluster.Pod{
			Namespace: pod.Namespace,
			Name:      pod.Name,
			Node:      demoNodeName,
			Ended:     pod.Phase != simkubelet.Running,
			Requests:  requests,
		})
	}
	return snapshot
}

// statusAt reads the status page of the node.
func statusAt(ctx context.Context, address string) (*status.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/api/v1/status", nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Body.Close() }()
	page := &status.Status{}
	return page, json.NewDecoder(answer.Body).Decode(page)
}
