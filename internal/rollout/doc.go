// Package rollout gives many Nodes a profile or a MIG layout, a few at a time, by the label that
// names it, and puts every Node back to what it had.
//
// What a rollout is to do, to which Nodes, and who drives it, lies in a ConfigMap in Virgate's namespace
// (plan.go), so that anybody who may write there can go on from another machine, and no node can change
// it. A Node has an annotation with its own Progress alone, and is believed that about itself and
// nothing else. Every write is a patch of one object with the resourceVersion that was looked at, and
// a label is set in one patch with the Progress that says so: a program that is killed between any
// two writes leaves nothing that the next one could misread.
//
// How it is used:
//
//	// config is a *rest.Config, as cluster.Config returns it.
//	client, err := rollout.NewClient(config, "virgate", "alice@host (process 7)")
//	client.Progress = func(r *rollout.Rollout) { … }     // Nil for nobody.
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
// node is in the way, and ErrInterrupted when ctx ends, having said so in the Head.
//
// plan.go has what is kept in the ConfigMap, record.go what is kept on Nodes and what both are
// together, next.go what is to be done next, which is pure, claim.go how Nodes become part of a
// rollout, drive.go the loop that does it, with the lease, and client.go the requests.
package rollout
