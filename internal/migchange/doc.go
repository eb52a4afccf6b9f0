// Package migchange brings the node's GPUs to the MIG layout that is wanted of
// them. It decides which steps lead there, what has to be withdrawn from the
// kubelet first and what has to be waited for; makes the steps; and keeps a
// journal, so that a change which was interrupted is finished or undone at the next
// start. A partition that somebody uses is never destroyed.
//
// It does not place partitions, which is for package mig, and talks neither to the
// driver nor to the kubelet itself: whoever uses it hands both over in Options.
//
// To read it: decide.go says what is to be done about one GPU, and holders.go who
// is in the way; both are pure, but for the reading of the holders. reconciler.go goes
// through the GPUs, and the rest are its parts, each with its own lock: offer.go says
// what may be offered meanwhile, journal.go is what survives the program, status.go says
// how far the GPUs are, and changes.go which of them are being changed. execute.go makes
// the steps. Only the journal's lock is held while another of them is taken, which is
// that of offer.go.
package migchange
