// Package rollout gives many Nodes a profile or a MIG layout, a few at a time, by the label that
// names it, and can put every Node back to what it had.
//
// A ConfigMap in Virgate's namespace (plan.go) holds what a rollout does, to which Nodes, and who
// drives it. So anyone who may write there can continue it from another machine, and no node can
// change it. A Node's annotation holds only the Node's own Progress, and is trusted for nothing
// else. Every write patches one object at the resourceVersion that was read, and a label is set in
// the same patch as the Progress that records it. A program killed between any two writes therefore
// leaves nothing that the next one could misread.
//
// Usage:
//
//	// config is a *rest.Config, as kube.UserConfig returns it.
//	client, err := rollout.NewClient(config, "virgate", "alice@host (process 7)")
//	client.Progress = func(r *rollout.Rollout) { … }     // Optional.
//	r, err := client.Start(ctx, rollout.Spec{
//		To:             "p",
//		Selector:       selector,
//		MaxUnavailable: "10%",
//		Timeout:        10 * time.Minute,
//	})
//	r, err = client.Drive(ctx, r.ID, rollout.Resume{})  // Until the end, a pause or a stop.
//	r, err = client.Undo(ctx, r.ID, false)
//	all, err := client.List(ctx)
//	err = client.Pause(ctx, r.ID)
//	err = client.Forget(ctx, r.ID, false)
//
// Start claims the Nodes and sets no label; Drive does. Drive and Undo return ErrStopped when a
// node is in the way. When ctx ends, they record that in the State and return ErrInterrupted.
//
// Files: plan.go is the ConfigMap; record.go the Nodes' annotations and the two joined; next.go the
// pure function that decides the next step; claim.go how Nodes join a rollout; drive.go the loop
// and the lease; client.go the requests.
package rollout
