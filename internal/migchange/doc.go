// Package migchange brings the node's GPUs to their wanted MIG layout. It decides which steps lead
// there, what must be withdrawn from the kubelet first and what to wait for. It makes the steps,
// and keeps a journal, so that an interrupted change is finished or undone at the next start. It
// never destroys a partition in use.
//
// Package mig places the partitions. This package accesses neither the driver nor the kubelet
// directly: its caller provides both in Options.
//
// Files: decide.go decides about one GPU, and holders.go finds what is in the way; both are pure,
// except for reading the holders. reconciler.go goes through the GPUs. The other files are its
// parts, each with its own lock: offer.go is what may be offered meanwhile, journal.go what
// survives a restart, status.go how far the GPUs are, and changes.go which are being changed.
// execute.go makes the steps. Only the journal's lock is held while another lock is taken: that of
// offer.go.
package migchange
